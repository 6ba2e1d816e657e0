"""Units of weights below ZeRO 3: which there are, which move, how a missing one is found. Plain torch."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")
from mist_patches.core.absent_weights import tensors_in  # noqa: E402
from mist_patches.core.hooking import PatchRefused  # noqa: E402
from mist_patches.core.host_copies import Held, Meter, Streams  # noqa: E402
from mist_patches.deepspeed.flat_weights import (  # noqa: E402
    FlatWeights,
    _chosen,
    _of_its_own,
    _units,
    _watch,
)
from mist_patches.deepspeed.group_steps import Steps, Waiting  # noqa: E402
from torch import nn  # noqa: E402


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(100))])
        self.shift = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight


def optimizer(model: nn.Module) -> types.SimpleNamespace:
    """Groups as they are cut by layer, in two of which a layer's weights are: decayed or not."""
    layers = [*model.layers]
    groups = [
        [model.table.weight],
        *([layer.up.weight] for layer in layers),
        [model.shift],
        [model.scales[0]],
        *([layer.up.bias, *layer.norm.parameters()] for layer in layers),
    ]
    flats = [torch.cat([p.detach().flatten() for p in group]) for group in groups]
    return types.SimpleNamespace(bit16_groups=groups, bit16_groups_flat=flats)


def test_units_are_layers_in_the_order_of_the_model() -> None:
    model = Model()
    units = _units(optimizer(model), model)
    assert [unit.name for unit in units] == ["", "table", "layers.0", "layers.1", "layers.2", "scales"]
    assert [unit.groups for unit in units[2:5]] == [[1, 6], [2, 7], [3, 8]]
    layer = model.layers[1]
    assert set(units[3].places) == {layer, layer.up, layer.norm}
    # Of shared weights both modules tell when they are needed; a list of parameters tells nothing.
    assert set(units[1].places) == {model.table, model.head}
    assert [unit.movable for unit in units] == [False, True, True, True, True, False]


def test_other_units_make_up_for_those_that_stay_while_they_can() -> None:
    model = Model()
    engine = optimizer(model)
    units = _units(engine, model)
    sizes = {unit.name: sum(4 * engine.bit16_groups_flat[k].numel() for k in unit.groups) for unit in units}
    total, most = sum(sizes.values()), sum(sizes[unit.name] for unit in units if unit.movable)
    for fraction in (0.1, 0.3, 0.5, most / total):
        moved = sum(sizes[unit.name] for unit in _chosen(units, engine.bit16_groups_flat, fraction))
        assert abs(moved - fraction * total) <= max(sizes.values()) / 2
    with pytest.raises(PatchRefused, match=f"only {most / total:.3f} of the bytes can move.*itself, scales"):
        _chosen(units, engine.bit16_groups_flat, 1.0)


def test_what_is_to_be_overwritten_is_not_copied_in_and_goes_out_changed() -> None:
    meter, flat = Meter(), torch.arange(4.0)
    held = Held([flat], Streams(gpu=False), meter)
    held.release()
    held.overwrite()
    assert meter.moved_in_bytes == 0 and flat.untyped_storage().nbytes() == 16
    flat.fill_(7.0)
    held.release()
    held.use()
    assert flat.tolist() == [7.0] * 4 and meter.moved_out_bytes == 32


def test_a_weight_that_is_away_is_found_when_it_is_read_and_not_when_it_is_looked_at() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    held = Held([weight.data], Streams(gpu=False), Meter())
    unit = types.SimpleNamespace(name="layers.4", held={0: held})
    weights = types.SimpleNamespace(moved=[unit])
    held.release()
    with _watch(weights):
        assert weight.shape == (3, 3) and weight.detach().dtype == torch.float32
        assert torch.zeros_like(weight).sum() == 0.0
        with pytest.raises(PatchRefused, match=r"weights of layers\.4 are used"):
            nn.functional.linear(torch.ones(1, 3), weight)
        held.use()
        assert nn.functional.linear(torch.ones(1, 3), weight).tolist() == [[3.0] * 3]


def test_tensors_of_an_output_however_it_is_nested() -> None:
    a, b, c = (torch.ones(1) for _ in range(3))
    assert [id(t) for t in tensors_in({"x": a, "y": (b, None, [c], 3)})] == [id(a), id(b), id(c)]


def test_weights_that_will_be_written_anew_are_not_fetched_ahead() -> None:
    units = [
        types.SimpleNamespace(held={k: Held([torch.ones(4)], Streams(gpu=False), Meter())}) for k in range(3)
    ]
    weights = FlatWeights.__new__(FlatWeights)
    weights.moved = units
    steps = Steps({}, waiting={1: Waiting([])})
    weights._optimizer = lambda: types.SimpleNamespace(_mist_steps=steps)
    for unit in units:
        unit.held[units.index(unit)].release()
    weights._fetch_ahead(units[0], 1)
    weights._fetch_ahead(units[1], 1)
    assert [unit.held[k].on_device for k, unit in enumerate(units)] == [False, False, True]


def test_a_group_that_is_a_part_of_a_storage_gets_one_of_its_own() -> None:
    """Else all that shares the storage would be freed with it, or nothing."""
    flats = [torch.arange(8.0)[2:6], torch.arange(4.0)]
    engine = types.SimpleNamespace(bit16_groups_flat=list(flats), parallel_partitioned_bit16_groups=[[], []])
    engine.get_data_parallel_partitions = lambda flat, index: list(flat.split(2))
    updated: list[int] = []
    engine._update_model_bit16_weights = updated.append
    apart, same = (_of_its_own(engine, k) for k in range(2))
    assert apart.untyped_storage().nbytes() == 16 and apart.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert engine.parallel_partitioned_bit16_groups[0][1].data_ptr() == apart[2:].data_ptr()
    assert same.data_ptr() == flats[1].data_ptr() and updated == [0]
