"""Products in half precision of the tests' training are fp32's, rounded once, and so are their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
import half_products  # noqa: E402


@pytest.fixture
def installed() -> Iterator[None]:
    library = half_products.install()
    yield
    library._destroy()


@pytest.mark.parametrize("kind", half_products.HALF)
def test_products_and_gradients_are_rounded_once(installed: None, kind: str) -> None:
    generator, half = torch.Generator().manual_seed(3), getattr(torch, kind)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(half)

    def rounded(wide: torch.Tensor) -> torch.Tensor:
        assert not torch.equal(wide, wide.to(half).float()), "there is something to round"
        return wide.to(half)

    rows, weight, bias, grad = drawn(24, 40), drawn(16, 40), drawn(16), drawn(24, 16)
    heads, others, added = drawn(3, 8, 40), drawn(3, 40, 8), drawn(3, 8, 8)
    rows.requires_grad_()
    made = torch.nn.functional.linear(rows, weight)
    assert torch.equal(made, rounded(rows.detach().float() @ weight.float().t()))
    made.backward(grad)
    assert torch.equal(rows.grad, rounded(grad.float() @ weight.float()))
    biased = torch.addmm(bias.float(), rows.detach().float(), weight.float().t())
    assert torch.equal(torch.nn.functional.linear(rows, weight, bias), rounded(biased))
    assert torch.equal(torch.bmm(heads, others), rounded(heads.float() @ others.float()))
    scaled = torch.baddbmm(added.float(), heads.float(), others.float(), beta=0.5, alpha=2.0)
    assert torch.equal(torch.baddbmm(added, heads, others, beta=0.5, alpha=2.0), rounded(scaled))
