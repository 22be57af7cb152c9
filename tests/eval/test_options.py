"""Arguments that make no sense end an evaluation before it takes the place of older results."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eval import crash, reserve_coverage, soak, step_times
from eval.fuzz import run as fuzz
from eval.two_servers import run as two_servers


@pytest.mark.parametrize(
    ("main", "argument", "value", "problem"),
    [
        (crash.main, "--rounds", "0", "0 is not a whole number above 0"),
        (crash.main, "--lines", "-1", "-1 is not a whole number above 0"),
        (soak.main, "--minutes", "0", "0 is not a number above 0"),
        (soak.main, "--name", "../soak", "'../soak' does not name one folder"),
        (fuzz.main, "--seconds", "nan", "nan is not a number above 0"),
        (fuzz.main, "--minutes", "x", "invalid positive value: 'x'"),
        (two_servers.main, "--documents", "0", "0 is not a whole number above 0"),
        (step_times.main, "--live-s", "inf", "inf is not a number above 0"),
        (step_times.main, "--clients", "1.5", "invalid count value: '1.5'"),
        (reserve_coverage.main, "--name", "..", "'..' does not name one folder"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(
    main: Callable[[list[str]], object],
    argument: str,
    value: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main([argument, value])
    assert end.value.code == 2
    assert problem in capsys.readouterr().err
