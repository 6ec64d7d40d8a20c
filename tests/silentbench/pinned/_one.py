"""One case of a program, judged by `verify`: its file and its number are the arguments; prints JSON."""

import json
import sys

from tp_core.builders import load_function
from tp_core.ranks import RankPool
from tp_verify import verify


def main(file: str, number: int) -> None:
    cases = load_function(f"{file}:cases", example="cases")()
    case = cases if isinstance(cases, dict) else cases[number]
    with RankPool(case.get("ranks", 2), timeout_s=600) as pool:
        report = verify(**{**case, "ranks": pool, **({"reload_on": pool} if "reload_on" in case else {})})
    print(json.dumps({"found": not report.ok, "said": str(report.finding or ""), "seconds": report.seconds}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
