"""A loop in JAX, killed and resumed."""

from pathlib import Path

from tests.trainers.kit import check_kill_and_resume


def test_a_jax_loop(tmp_path: Path) -> None:
    check_kill_and_resume("jax_run", tmp_path)
