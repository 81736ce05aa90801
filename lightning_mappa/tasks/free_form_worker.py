"""Compares answers with references by math-verify, in a process that may be killed at any time.

Run as a script by `free_form`: it needs math-verify and the standard library only. A line of JSON with `gold`,
`answer` and `limit_s` comes in, a line with `right`, or with `fault` and `detail`, goes out. What takes longer than
its limit ends the process by SIGALRM, wherever it is: also in C code, and also when nobody waits for it any more.
"""

import json
import logging
import resource
import signal
import sys


def main() -> None:
    memory_bytes = int(sys.argv[1])
    # It computes and answers: it writes no file, leaves no core, and has its share of memory.
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    compare(parse, verify, "1", "1")  # loads what is loaded late
    answer_line({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        result = compare(parse, verify, request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer_line(result)


def compare(parse, verify, gold, answer):  # type: ignore[no-untyped-def]
    """Both are contents of a box. The library's own limits need threads' signals: here the process is the limit."""
    try:
        golds = parse(boxed(gold), parsing_timeout=None)
        if not golds:
            return {"fault": "reference", "detail": "it cannot be read as mathematics"}
        answers = parse(boxed(answer), parsing_timeout=None)
        return {"right": bool(answers) and bool(verify(golds, answers, timeout_seconds=None))}
    except MemoryError:
        return {"fault": "answer", "detail": "comparing it needs too much memory"}
    except Exception as error:
        return {"fault": "answer", "detail": f"{type(error).__name__} while it was compared"}


def boxed(text):  # type: ignore[no-untyped-def]
    return "$\\boxed{" + text + "}$"


def answer_line(result):  # type: ignore[no-untyped-def]
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
