"""What a wrong estimate of a step's time costs: Echo with every prediction off by some share.

    python -m eval.estimator_error --workload azure-qmsum

The ablation with the preset echo and `estimator.error` from -10 % to +10 %; takes its options
and writes eval/results/ablation-estimator-error/. Source: HyGen figure 14.
"""

from __future__ import annotations

import shlex
import sys

from eval.ablation.arms import ERRORS, error_arm_name
from eval.ablation.options import parse_options
from eval.ablation.run import run_and_print

NAME = "estimator-error"


def main(argv: list[str]) -> None:
    """Run it; ends with code 1 for wrong input and when an arm could not be measured."""
    arms = ",".join(error_arm_name(error) for error in ERRORS)
    prog = "python -m eval.estimator_error"
    options = parse_options(argv, prog, name=NAME, arms=arms)
    run_and_print(options, f"{prog} {shlex.join(argv)}".strip())


if __name__ == "__main__":
    main(sys.argv[1:])
