"""False verdicts and power of a sweep, simulated with `report/sweep.py`'s own `compare`.

    python tests/benchmarks/sim_sweep.py [--sweeps 1000]

The first table has the share of differences of nothing that get a verdict. One recipe in four scatters `ratio` times as
far as the baseline, the others as far as the baseline. The second table has the smallest difference that four sweeps in
five decide, in standard deviations of the baseline's rest.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from gpt2small_hf.report.sweep import BASELINE, Losses, compare

RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 20.0)
REST, INIT, TRAINING = 0.0126, 0.014, 0.010
"""Standard deviations like those of examples/EXPERIMENTS.md, in nats."""


def simulate(
    rng: np.random.Generator, *, ratio: float, grid: int, pairs: int, recipes: int, carried: float = 1.0
) -> Losses:
    """Draw the losses of a sweep in which no recipe differs from the baseline.

    Args:
        rng: source of the noise.
        ratio: scatter of every fourth recipe as a multiple of the baseline's.
        grid: number of initial-weight seeds of the baseline, each with as many training seeds.
        pairs: number of pairs of seeds of every other recipe.
        recipes: number of recipes besides the baseline.
        carried: share of the variance of the seeds' effects that all recipes have in common.
    """
    sizes = np.array([[INIT], [TRAINING]])
    shared = rng.normal(size=(2, grid))
    losses = {}
    for name in [BASELINE, *map(str, range(recipes))]:
        own = rng.normal(size=(2, grid))
        effects = sizes * (math.sqrt(carried) * shared + math.sqrt(1 - carried) * own)
        scatter = REST * (ratio if name != BASELINE and int(name) % 4 == 0 else 1.0)
        seeds = (
            [(i, t) for i in range(grid) for t in range(grid)] if name == BASELINE else [(k, k) for k in range(pairs)]
        )
        for i, t in seeds:
            losses[name, i, t] = 4 + effects[0, i] + effects[1, t] + scatter * rng.normal()
    return losses


def false_verdicts(rng: np.random.Generator, sweeps: int, **settings: float) -> tuple[float, float, float]:
    """Simulate sweeps and count verdicts.

    Returns: the share of verdicts among recipes that scatter `ratio` times as far, among the others, and the share of
        sweeps with at least one.
    """
    decided = np.array(
        [
            [difference.verdict != "undecided" for difference in compare(simulate(rng, **settings))[0].values()]  # pyright: ignore[reportArgumentType]
            for _ in range(sweeps)
        ]
    )
    scattering = np.arange(decided.shape[1]) % 4 == 0
    return decided[:, scattering].mean(), decided[:, ~scattering].mean(), decided.any(axis=1).mean()


def detectable(rng: np.random.Generator, sweeps: int, share: float = 0.8, **settings: float) -> float:
    """The smallest difference that this share of sweeps decides with the right sign, in units of `REST`."""
    needed = []
    for _ in range(sweeps):
        for name, difference in compare(simulate(rng, **settings))[0].items():  # pyright: ignore[reportArgumentType]
            if int(name) % 4 == 0 and difference.decided_above is not None:
                needed.append((difference.decided_above - difference.value) / REST)
    return float(np.quantile(needed, share))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=1000)
    sweeps = parser.parse_args().sweeps
    rng = np.random.default_rng(0)
    designs = {
        "3 x 3, 2 pairs, 16 recipes": {"grid": 3, "pairs": 2, "recipes": 16},
        "3 x 3, 3 pairs, 16 recipes": {"grid": 3, "pairs": 3, "recipes": 16},
        "4 x 4, 4 pairs, 16 recipes": {"grid": 4, "pairs": 4, "recipes": 16},
        "3 x 3, 2 pairs, 2 recipes": {"grid": 3, "pairs": 2, "recipes": 2},
    }
    print("false verdicts (recipes that scatter `ratio` times as far, the others, sweeps with at least one)")
    for name, design in designs.items():
        print(f"\n{name}\n{'ratio':>6}{'scattering':>12}{'others':>8}{'any':>7}")
        for ratio in RATIOS:
            at, others, either = false_verdicts(
                rng, sweeps * (1 if design["recipes"] > 2 else 4), ratio=ratio, **design
            )
            print(f"{ratio:>6g}{at:>12.1%}{others:>8.1%}{either:>7.0%}")
    print("\nseeds' effects that recipes do not share (3 x 3, 2 pairs, 16 recipes, ratio 1)")
    for carried in (0.5, 0.0):
        at, others, _ = false_verdicts(rng, sweeps, ratio=1.0, carried=carried, **designs["3 x 3, 2 pairs, 16 recipes"])
        print(f"carried {carried:g}: {(at + others) / 2:.1%}")
    print("\ndifference found in 80 % of sweeps, in standard deviations of the rest")
    for name, design in designs.items():
        sizes = [f"{detectable(rng, sweeps // 2, ratio=ratio, **design):.1f}" for ratio in (0.5, 1.0, 2.0, 4.0)]
        print(f"{name:<28} ratio 0.5, 1, 2, 4: {', '.join(sizes)}")


if __name__ == "__main__":
    main()
