"""`.sample`: draws from an index before it is sharded, by weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from streamline.core.lazy_numpy import np
from streamline.core.options import check_flag, check_int, check_seed, type_and_repr
from streamline.errors import PlanError, PlanTypeError
from streamline.sharding.index import Index, Sampled, SampledOnce
from streamline.transforms.base import Stage

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

ANEW = "every item would be at another place, so that some came twice and others never: the next epoch can have another"


@dataclass(frozen=True)
class Weights:
    """One weight for each item; compared, and saved, by a digest of all."""

    values: NDArray[np.float64] = field(repr=False, compare=False)
    digest: str

    def __repr__(self) -> str:
        return f"<{len(self.values):,} weights>"


@dataclass(frozen=True, kw_only=True)
class Sample(Stage[T, T]):
    """Draws `count` items of the index by weights, in each epoch others; None: as many as there are."""

    kind: ClassVar[str] = "sample"
    refuses: ClassVar[Mapping[str, str]] = {
        **{option: f"{ANEW} {option}=" for option in ("count", "replacement", "seed")},
        "weights": f"{ANEW} weights=",
    }
    before_shard = frozenset({"index"})
    moves_items: ClassVar[bool] = True

    count: int | None = None
    weights: Weights | None = None
    replacement: bool = True
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "weights": None if self.weights is None else self.weights.digest}

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        index = inner(epoch)
        if index.length is None:
            raise PlanError("an endless index can't be sampled: put .sample before .repeat")
        weights = None if self.weights is None else self.weights.values
        if weights is not None and len(weights) != index.length:
            raise PlanError(
                f".sample(weights=) has a weight for each item that it draws from, {index.length:,} here, got "
                f"{len(weights):,}"
            )
        count = index.length if self.count is None else self.count
        entropy = [self.seed, *epoch]
        if self.replacement:
            return Sampled(index, weights, count if index.length else 0, entropy)
        assert weights is not None
        if count > (likely := int(np.count_nonzero(weights))):
            raise PlanError(
                f".sample(replacement=False) draws each item once, and {likely:,} of {index.length:,} have a weight "
                f"above 0: draw at most as many, got {count:,}"
            )
        return SampledOnce(index, weights, count, entropy)

    def num_outputs(self, items: float) -> float | None:
        return items if self.count is None else self.count if items else 0


def sample_of(count: int | None, weights: object, replacement: bool, seed: int, *, name: str) -> Sample[Any]:
    check_flag(".sample(replacement=)", replacement)
    if weights is None and not replacement:
        raise PlanError(".sample(replacement=False) without weights= is .shuffle().take(count)")
    return Sample(
        name=name,
        count=None if count is None else check_int(".sample(count)", count, 0),
        weights=None if weights is None else _check_weights(weights),
        replacement=replacement,
        seed=check_seed(".sample(seed=)", seed),
    )


def _check_weights(weights: object) -> Weights:
    try:
        values = np.array(weights, np.float64)
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.ndim != 1:
        raise PlanTypeError(
            f".sample(weights=) is a number for each item, a list or an array of them, got {type_and_repr(weights)}"
        )
    if not np.isfinite(values).all() or (values < 0).any() or (len(values) and not values.any()):
        raise PlanError(".sample(weights=) are finite, none is below 0, and one of them at least is above 0")
    values.flags.writeable = False
    return Weights(values, hashlib.sha256(values.tobytes()).hexdigest()[:16])
