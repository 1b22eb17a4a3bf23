"""The devices that `.transfer` takes: checked when a plan is written, found when it is opened."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from streamline.core.lazy_numpy import loaded_np
from streamline.core.text import quantity
from streamline.core.tree import replaced
from streamline.errors import DataError, PlanError, PlanTypeError, install
from streamline.transfer.base import Copies, HostMemory, Mover, Target, as_tensor, check_array, is_plain

logger = logging.getLogger("streamline.transfer")

FORMS = '"host", "cpu", "cuda", "cuda:1", "mps" or "jax", a torch.device, a device or sharding of JAX, or a Target'

IN_PLACE = ("host", "cpu")
"""Devices in whose memory batches already are: nothing is copied in the background."""

NAME = re.compile(r"host|cpu|cuda(:\d+)?|mps|jax")


def written(device: object) -> Any:
    """Return a device as a plan holds it: its name, or JAX's own object. Imports nothing, looks for nothing.

    Raises:
      PlanError: a name that no device has; PlanTypeError: something else.
    """
    if _is_of(device, "torch", "device"):
        device = str(device).removesuffix(":0") if str(device) in ("cpu:0", "mps:0") else str(device)
    if isinstance(device, str):
        if not NAME.fullmatch(device):
            raise PlanError(f".transfer(device) is {FORMS}; got {device!r}")
        return device
    if isinstance(device, Target) or _is_of(device, "jax", "Device") or _is_of(device, "jax.sharding", "Sharding"):
        return device
    raise PlanTypeError(f".transfer(device) is {FORMS}; got {device!r}, a {type(device).__name__}")


def found(device: Any) -> Target:
    """Return the device that `written` has checked; "cuda" is the calling thread's current GPU.

    Raises:
      PlanError: its library isn't installed, or sees no such device; the message says what to do.
    """
    if device == "host":
        return HostMemory()
    if isinstance(device, Target):
        return device
    if isinstance(device, str) and device != "jax":
        torch = _torch(device)
        return _cuda(torch, device) if device.startswith("cuda") else _memory(torch, device)
    return _jax(None if isinstance(device, str) else device)


def _memory(torch: Any, device: str) -> Target:
    if device == "mps" and not torch.backends.mps.is_available():
        raise PlanError(
            f'.transfer("mps"): torch {torch.__version__} sees no Apple GPU here: .transfer("cpu") makes tensors'
        )
    return TorchMemory(device)


def _cuda(torch: Any, device: str) -> Target:
    if not torch.cuda.is_available():
        built = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None)
        why = (
            "it was built for it, but there is no GPU, no driver, or CUDA_VISIBLE_DEVICES hides them"
            if built
            else "it was built without: https://pytorch.org/get-started has builds with it"
        )
        raise PlanError(
            f'.transfer("{device}"): torch {torch.__version__} can use no CUDA device here: {why}. Without a GPU, '
            '.transfer("cpu") gives the same batches'
        )
    count = int(torch.cuda.device_count())
    _, _, number = device.partition(":")
    index = int(number) if number else int(torch.cuda.current_device())
    if index >= count:
        raise PlanError(
            f'.transfer("{device}"): torch sees {quantity(count, "CUDA device")}, numbered from 0; each rank '
            'takes its own with torch.cuda.set_device(n) and .transfer("cuda")'
        )
    from streamline.transfer.cuda import Cuda

    return Cuda(index)


def _jax(place: Any) -> Target:
    if not _installed("jax"):
        raise PlanError(f'.transfer("jax") needs JAX, which is not installed: {install("jax")}')
    return Jax(place, spread=not getattr(place, "is_fully_addressable", True))


def _torch(device: str) -> Any:
    if not _installed("torch"):
        raise PlanError(
            f'.transfer("{device}") needs torch, which is not installed: {install("torch")}, or '
            '.transfer("host") leaves arrays where they are'
        )
    import torch

    return torch


def _installed(library: str) -> bool:
    return library in sys.modules or find_spec(library) is not None


def _is_of(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of a library that, if so, has been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


@dataclass(frozen=True)
class TorchMemory(Target):
    """torch's tensors in the host's memory, or on Apple's GPUs: no pinned memory, no copies in the background.

    Attributes:
      device: "cpu" or "mps".
    """

    device: str

    def mover(self, depth: int) -> Mover:
        _log_once(self.device)
        return _Moves(self.device)


class _Moves(Mover):
    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._copies = Copies()
        self.details = self._copies.details

    def move(self, batch: Any) -> Any:
        return replaced(batch, self._move)

    def _move(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, loaded_np.ndarray):
            tensor, copied = as_tensor(self._torch, leaf, where), not is_plain(leaf)
        elif isinstance(leaf, self._torch.Tensor):
            tensor, copied = leaf, False
        else:
            return leaf
        there = tensor if tensor.device.type == self._device else tensor.to(self._device)
        if copied or there is not tensor:
            self._copies.copied_bytes += leaf.nbytes
        return there


@cache
def _log_once(device: str) -> None:
    """Log once a process what this device doesn't do."""
    logger.info(
        'transfer("%s"): pinned memory, and copies beside the computation, are for CUDA; here a batch is %s',
        device,
        "made of tensors in place" if device == "cpu" else "copied before it is handed out, up to depth= of them ahead",
    )


@dataclass(frozen=True)
class Jax(Target):
    """A device or a sharding of JAX, which copies asynchronously, and orders its own work after its copies.

    Attributes:
      place: what `jax.device_put` takes; None: the default device.
      spread: whether it spans devices of other processes: each gives its own part.
    """

    place: Any = None
    spread: bool = False

    def mover(self, depth: int) -> Mover:
        return _Puts(self.place, self.spread)


class _Puts(Mover):
    def __init__(self, place: Any, spread: bool) -> None:
        import jax

        self._jax = jax
        self._place = place
        self._spread = spread
        self._copies = Copies()
        self.details = self._copies.details

    def move(self, batch: Any) -> Any:
        return replaced(batch, self._put)

    def _put(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, loaded_np.ndarray):
            check_array(leaf, where)
            if leaf.dtype.kind in "OSUMmT" or leaf.dtype.names is not None:
                raise DataError(
                    f"{where}: JAX has no dtype for a NumPy array of {leaf.dtype}: convert it in a .map before "
                    ".transfer, or make it a list there, which stays what it is"
                )
        elif not isinstance(leaf, self._jax.Array):
            return leaf
        self._copies.copied_bytes += leaf.nbytes
        if self._spread and getattr(leaf, "is_fully_addressable", True):  # device_put requires the same on all
            return self._jax.make_array_from_process_local_data(self._place, leaf)
        return self._jax.device_put(leaf, self._place)
