"""False verdicts and power of a sweep, simulated with the paired t test of `report/sweep.py`.

    python tests/benchmarks/sim_sweep.py [--sweeps 50000]

The first tables have the share of recipes that do not differ from the baseline and get a verdict, with the standard
error of the simulation. Every fourth recipe scatters `ratio` times as far as the baseline, the others as far as the
baseline. The last table has the smallest difference that four sweeps in five decide.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from gpt2small_hf.evaluation.estimates import error_of_mean, student_factor
from gpt2small_hf.report.sweep import BASELINE, Losses

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 20.0)
REST, INIT, TRAINING = 0.0126, 0.014, 0.010
"""Standard deviations like those of examples/EXPERIMENTS.md, in nats."""

CHUNK = 5000
"""Sweeps drawn at a time, for memory."""


def simulate(
    rng: np.random.Generator,
    sweeps: int,
    *,
    ratio: float,
    grid: int = 3,
    pairs: int = 2,
    recipes: int = 17,
    carried: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the losses of sweeps in which no recipe differs from the baseline.

    Args:
        rng: source of the noise.
        sweeps: number of sweeps.
        ratio: scatter of every fourth recipe as a multiple of the baseline's.
        grid: number of initial-weight seeds of the baseline, each with as many training seeds.
        pairs: number of pairs of seeds of every other recipe.
        recipes: number of recipes besides the baseline.
        carried: share of the variance of the seeds' effects that all recipes have in common.

    Returns: losses of the baseline, (sweeps, initial-weight seed, training seed), and of the others, (sweeps, recipe,
        pair).
    """
    shared, own = rng.normal(size=(sweeps, 1, 2, grid)), rng.normal(size=(sweeps, recipes + 1, 2, grid))
    effects = math.sqrt(carried) * shared + math.sqrt(1 - carried) * own
    init, training = INIT * effects[:, :, 0], TRAINING * effects[:, :, 1]
    rest = REST * rng.normal(size=(sweeps, grid, grid))
    scatter = REST * np.where(np.arange(recipes) % 4 == 0, ratio, 1.0)[:, None]
    others = scatter * rng.normal(size=(sweeps, recipes, pairs))
    baseline = 4 + init[:, 0, :, None] + training[:, 0, None, :] + rest
    return baseline, 4 + (init + training)[:, 1:, :pairs] + others


def as_losses(baseline: np.ndarray, others: np.ndarray) -> Losses:
    """One simulated sweep as `compare` takes it."""
    grid = {(BASELINE, i + 1, t + 1): float(loss) for (i, t), loss in np.ndenumerate(baseline)}
    return grid | {(str(recipe), k + 1, k + 1): float(loss) for (recipe, k), loss in np.ndenumerate(others)}


def differences(baseline: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Difference of each recipe from the baseline, and above which it is decided; both (sweeps, recipe)."""
    pairs = others.shape[-1]
    of_runs = others - baseline[:, None, range(pairs), range(pairs)]
    return of_runs.mean(axis=-1), student_factor(pairs - 1) * error_of_mean(of_runs)


def false_verdicts(rng: np.random.Generator, sweeps: int, **settings: float) -> dict[str, tuple[float, float]]:
    """Simulate sweeps and count verdicts.

    Returns: the share of verdicts among recipes that scatter `ratio` times as far (`scattering`), among the `others`,
        and the share of sweeps with at least one (`any`); each with its standard error over sweeps.
    """
    shares = []
    for start in range(0, sweeps, CHUNK):
        drawn = simulate(rng, min(CHUNK, sweeps - start), **settings)  # pyright: ignore[reportArgumentType]
        value, above = differences(*drawn)
        decided = np.abs(value) > above
        scattering = np.arange(decided.shape[1]) % 4 == 0
        kinds = (decided[:, scattering].mean(axis=1), decided[:, ~scattering].mean(axis=1), decided.any(axis=1))
        shares.append(np.stack(kinds))
    of_sweeps = np.concatenate(shares, axis=1)
    errors = of_sweeps.std(axis=1) / math.sqrt(sweeps)
    names = ("scattering", "others", "any")
    return {name: (float(of_sweeps[at].mean()), float(errors[at])) for at, name in enumerate(names)}


def detectable(rng: np.random.Generator, sweeps: int, share: float = 0.8, **settings: float) -> float:
    """The smallest difference that this share of sweeps decides with the right sign, in units of `REST`."""
    value, above = differences(*simulate(rng, sweeps, recipes=1, **settings))  # pyright: ignore[reportArgumentType]
    return float(np.quantile(above - value, share)) / REST


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=50_000)
    sweeps = parser.parse_args().sweeps
    rng = np.random.default_rng(0)
    designs = [
        {"grid": 3, "pairs": 2},
        {"grid": 3, "pairs": 3},
        {"grid": 5, "pairs": 2},
        {"grid": 5, "pairs": 5},
        {"grid": 3, "pairs": 2, "recipes": 2},
        {"grid": 3, "pairs": 2, "carried": 0.0},
    ]
    print("False verdicts in % of recipes that do not differ, ± standard error of the simulation")
    for design in designs:
        print("\n" + ", ".join(f"{name} {value:g}" for name, value in design.items()))
        print(f"{'ratio':>6}{'scattering':>15}{'others':>15}{'any in a sweep':>17}")
        for ratio in RATIOS:
            found = false_verdicts(rng, sweeps, ratio=ratio, **design)
            print(
                f"{ratio:>6g}" + "".join(f"{100 * share:>9.2f} ± {100 * error:.2f}" for share, error in found.values())
            )
    print("\nDifference that 80 % of sweeps decide, in standard deviations of the rest; of a recipe that scatters")
    print(f"{'pairs':>6}" + "".join(f"{f'{ratio:g} times':>12}" for ratio in RATIOS))
    for pairs in (2, 3, 4, 5):
        sizes = [detectable(rng, 4 * sweeps, ratio=ratio, grid=pairs, pairs=pairs) for ratio in RATIOS]
        print(f"{pairs:>6}" + "".join(f"{size:>12.1f}" for size in sizes))


if __name__ == "__main__":
    main()
