"""The schedule's communicator when neighbouring stages have different grids.

Megatron's 1F1B schedule asks a P2PCommunicator for activations and gradients. This one has the same methods
and passes tensors over BridgeCommunicators, which split or join the batch between data ranks and hand
the whole to each tensor rank. What the bridge does not know is sequence parallelism, where a tensor rank
holds a slice of the sequence: slices are joined before the bridge and cut again behind it.

Tested with megatron-core 0.19.2.
"""

from __future__ import annotations

from typing import Any

from mist_patches.core.hooking import PatchRefused
from mist_patches.megatron.grids import built_grids


class GridCommunicator:
    """In the place of megatron.core's P2PCommunicator, for the 1F1B schedule without interleaving."""

    def __init__(self, pp_group: Any, config: Any) -> None:
        if config.virtual_pipeline_model_parallel_size is not None:
            raise PatchRefused("stage_grids: the interleaved schedule cannot cross different grids")
        self.config = config
        self.pp_group = pp_group
        built = built_grids()
        self.current_stage = built.mine.stage
        self.total_stages = len(built.grids.stages)
        self.is_pp_first_stage = self.current_stage == 0
        self.is_pp_last_stage = self.current_stage == self.total_stages - 1
        self.virtual_pipeline_model_parallel_size = None
        self._slices = built.mine.tp if config.sequence_parallel else 1
        self._before: Any = None if self.is_pp_first_stage else built.bridges[self.current_stage - 1]
        self._behind: Any = None if self.is_pp_last_stage else built.bridges[self.current_stage]
        for bridge in (self._before, self._behind):
            if bridge is not None:
                bridge.comm_dtype = config.pipeline_dtype

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        return None if is_first_stage else self._input(self._before.recv_forward())

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        return None if is_last_stage else self._slice(self._behind.recv_backward())

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        if not is_last_stage:
            self._behind.send_forward(self._whole(output_tensors))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        if not is_first_stage:
            self._before.send_backward(self._whole(input_tensor_grads))

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        if is_last_stage:
            return None
        return self._slice(self._behind.send_forward_recv_backward(self._whole(output_tensors)))

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        if is_first_stage:
            return None
        return self._input(self._before.send_backward_recv_forward(self._whole(input_tensor_grads)))

    def _whole(self, tensor: Any) -> Any:
        """All of the sequence; each tensor rank of a sequence-parallel stage holds a slice."""
        import torch
        from megatron.core import parallel_state

        tensor = tensor.detach()
        if self._slices == 1:
            return tensor.contiguous()
        whole = torch.empty(
            (tensor.shape[0] * self._slices, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device
        )
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
        return whole

    def _slice(self, tensor: Any) -> Any:
        """This tensor rank's slice of the sequence, free of the graph that the bridge's joining left."""
        from megatron.core import parallel_state

        tensor = tensor.detach()
        if self._slices == 1:
            return tensor
        own = parallel_state.get_tensor_model_parallel_rank()
        return tensor.chunk(self._slices, dim=0)[own].clone()

    def _input(self, tensor: Any) -> Any:
        return self._slice(tensor).requires_grad_()
