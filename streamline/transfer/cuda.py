"""torch's CUDA devices: page-locked buffers, a stream for the copies, events, and `record_stream`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamline.core.lazy_numpy import loaded_np, np
from streamline.core.threads import SerialExecutor
from streamline.core.tree import replaced
from streamline.transfer.base import Mover, Target, as_tensor, dtype_of, is_plain
from streamline.transfer.pinned_ring import Done, RingMover


@dataclass(frozen=True)
class Cuda(Target):
    """One GPU; `index` as torch counts them."""

    index: int

    def mover(self, depth: int) -> Mover:
        return RingMover(CudaCopier(self.index), max(2, depth))


@dataclass(frozen=True)
class _Recorded:
    """A recorded event. A wait releases the core and the GIL."""

    event: Any

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopier:
    """Copies on a stream of its own. The current device is per thread, so each call names its device.

    Plain memory is staged, unless it is page-locked. Other strided tensors (transposed ones, those with gradients)
    torch copies synchronously. Sparse ones, and tensors on a GPU already, are moved in the consumer's thread: only its
    stream is ordered after the work that made them.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", index)
        self._own: Any = None

    @property
    def _stream(self) -> Any:
        if self._own is None:
            self._own = self._torch.cuda.Stream(device=self._device)
        return self._own

    def size(self, leaf: Any, where: str) -> int | None:
        if isinstance(leaf, loaded_np.ndarray):
            dtype_of(self._torch, leaf, where)
            return leaf.nbytes
        torch = self._torch
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return None
        return int(leaf.nbytes) if self._is_staged(leaf) else 0

    def allocate(self, size: int) -> Any:
        with self._torch.cuda.device(self._device):  # else it would be pinned for device 0, which may be another rank's
            return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def register(self, address: int, size: int) -> None:
        """In a thread of its own: a refusal is kept for the thread that asked, and raised by its next copy, too."""
        thread = SerialExecutor("streamline register")
        try:
            thread.submit(self._register, address, size).result()
        finally:
            thread.shutdown(wait=True)

    def _register(self, address: int, size: int) -> None:
        cuda = self._torch.cuda
        with cuda.device(self._device):
            cuda.check_error(cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> None:
        cuda = self._torch.cuda
        with cuda.device(self._device):
            cuda.check_error(cuda.cudart().cudaHostUnregister(address))

    def address(self, leaf: Any) -> int | None:
        if isinstance(leaf, loaded_np.ndarray):
            return leaf.ctypes.data if is_plain(leaf) else None
        return int(leaf.data_ptr())

    def stage(self, leaf: Any, buffer: Any, start: int) -> Any:
        memory = buffer[start : start + leaf.nbytes]
        if isinstance(leaf, loaded_np.ndarray) and not is_plain(leaf):
            native = leaf.dtype.newbyteorder("=")
            np.copyto(memory.numpy().view(native).reshape(leaf.shape), leaf)
            return memory.view(dtype_of(self._torch, leaf, "batch")).view(leaf.shape)
        tensor = as_tensor(self._torch, leaf, "batch") if isinstance(leaf, loaded_np.ndarray) else leaf
        staged = memory.view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        return staged

    def copy(self, staged: Any) -> Any:
        if isinstance(staged, loaded_np.ndarray):  # page-locked, or of no bytes
            staged = as_tensor(self._torch, staged, "batch")
        with self._torch.cuda.stream(self._stream):
            return staged.to(self._device, non_blocking=staged.is_pinned())

    def mark(self) -> Done:
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _Recorded(event)

    def hand_over(self, done: Done, copied: Sequence[Any], batch: Any) -> Any:
        assert isinstance(done, _Recorded)
        stream = self._torch.cuda.current_stream(self._device)
        stream.wait_event(done.event)
        for tensor in copied:
            tensor.record_stream(stream)
        return replaced(batch, self._from_elsewhere)

    def _from_elsewhere(self, leaf: Any, where: str) -> Any:
        elsewhere = isinstance(leaf, self._torch.Tensor) and leaf.device != self._device
        return leaf.to(self._device) if elsewhere else leaf

    def _is_staged(self, tensor: Any) -> bool:
        """Whether a tensor is nothing but memory, that isn't pinned already."""
        return bool(
            type(tensor) is self._torch.Tensor
            and tensor.is_contiguous()
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not tensor.is_pinned()
        )
