"""JAX's devices and shardings. JAX copies asynchronously, and orders its own work after its copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamline.core.lazy_numpy import loaded_np
from streamline.core.tree import replaced
from streamline.errors import DataError
from streamline.transfer.base import Copies, Mover, Target
from streamline.transfer.tensors import check_array


@dataclass(frozen=True)
class Jax(Target):
    """A device or a sharding.

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
        self.tells = self._copies.details

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
