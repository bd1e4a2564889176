"""What an interval costs by the sum to first order, by the exact value, and simulated: the table of docs/plan.md.

    python benchmarks/plan_sums.py

Needs simpy. The seeds are fixed: it prints the same each time, with the standard error of what was simulated.
"""

from ckpt_jax import plan, plan_sim

DAY = 86_400.0
# Interval, pause, mtbf, write, restart; a Weibull shape; and the interval that is left where saves are skipped.
CASES = [
    ("every 930 s, pause 5 s, a failure a day", (930, 5, DAY, 0, 0), 1.0, 930),
    (
        "every 52 min, pause 30 s, write 150 s, restart 10 min, one in 160,000 s",
        (3100, 30, 160_000, 150, 600),
        1.0,
        3100,
    ),
    ("every 2 h, pause 196 s, one a day", (7200, 196, DAY, 0, 0), 1.0, 7200),
    ("every 24 h, pause 196 s, restart 10 min, one a day", (DAY, 196, DAY, 0, 600), 1.0, DAY),
    ("Weibull, shape 0.5: every 2 h, pause 196 s, one a day", (7200, 196, DAY, 0, 0), 0.5, 7200),
    ("every 10 min, pause 5 s, write 115 min, one a day", (600, 5, DAY, 6900, 0), 1.0, 7200),
]


def main() -> None:
    print("| where | sum to first order | exact value | simulated |\n|---|---|---|---|")
    for words, (interval, pause, mtbf, write, restart), shape, every in CASES:
        known = {"write": write, "restart": restart}
        first = plan.waste(interval, pause, mtbf, **known).total
        exact = 1 - plan.goodput(every, pause, mtbf, **known)
        tier = plan.Tier(interval, pause, write, restart)
        run = plan_sim.Run(4000 * mtbf, [tier], [plan_sim.Failures(mtbf, shape=shape)])
        found = plan_sim.mean(run, runs=5, seed=1)
        print(f"| {words} | {first:.3%} | {exact:.3%} | {1 - found.goodput:.3%} ± {found.error:.3%} |", flush=True)


if __name__ == "__main__":
    main()
