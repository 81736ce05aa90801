"""Runs inside the sandbox, where this package is not: its text is given to `python -c`.

Arguments: the status descriptor, the program's path, the folders of installed packages joined by `:`, then one
value per name in `LIMITS`. It takes on the limits, writes `ready` to the descriptor, closes it, and becomes the
program: same process, same `__main__`, no frame of its own in a traceback.

Python is started with -S, because the hooks in `.pth` files (editable installs) take longer to run than all the
rest; what else `site` does is done here.
"""

import os
import resource
import site
import sys

LIMITS = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE")


def take_limits(values: "list[str]") -> None:
    for name, value in zip(LIMITS, values, strict=True):
        soft = int(value)
        # SIGXCPU comes at the soft limit and names the cause; a program that ignores it is killed a second later.
        hard = soft + 1 if name == "RLIMIT_CPU" else soft
        resource.setrlimit(getattr(resource, name), (soft, hard))


def add_site(packages: str) -> None:
    sys.path += [path for path in packages.split(":") if path]
    site.setquit()
    site.setcopyright()
    site.sethelper()


def become(path: str) -> None:
    system = sys  # the module's own names are gone once the program owns `__main__`
    with open(path, "rb") as file:
        source = file.read()
    names = vars(system.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names.update(__file__=path, __doc__=None)
    names.pop("__annotations__", None)
    system.argv[:] = [path]
    try:
        exec(compile(source, path, "exec", dont_inherit=True), names)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        error = error.with_traceback(trace.tb_next if trace else None)
        system.excepthook(type(error), error, error.__traceback__)
        system.exit(1)


if __name__ == "__main__":
    add_site(sys.argv[3])
    take_limits(sys.argv[4:])
    os.write(int(sys.argv[1]), b"ready\n")
    os.close(int(sys.argv[1]))
    become(sys.argv[2])
