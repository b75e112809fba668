"""Mutation tests: how many small changes of a module do its tests find?

    python -m tests.mutants STATE MODULE.py[,MODULE.py...] [--sample N] [--seed S] TEST_FILE...

The changes are those of mutmut's operators (`make mutants` installs it). This runner imports the
package and the tests once. Every mutant is one fork: the mutant's code object replaces that of the
function, so decorated functions count, too, and ranks that a test starts are forked with it. A
first pass records which tests run which lines. A mutant meets the tests of its lines, one file in a
fork of its own, those first that found others of the same function; the first failure ends it.

STATE is a folder. It keeps the verdicts, so the same command continues, and `survivors.txt`.
A mutant counts as killed when a test fails or exceeds four times its seconds. Not collected by
pytest, and not in `make test`: a thousand mutants take about ten minutes of one core.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str
    path: Path
    function: tuple[str, ...]  # names of classes and of the function
    lines: range  # of the changed statement
    in_parameters: bool  # a default value is changed
    render: Callable[[], str]  # the module's whole changed source

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)


# ---- mutants


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of the functions and methods of a module."""
    import libcst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
    from mutmut.mutation import file_mutation
    from mutmut.mutation.pragma_handling import get_ignored_lines

    class Visitor(file_mutation.MutationVisitor):
        def _skip_node_and_children(self, node):
            if isinstance(node, libcst.FunctionDef):  # mutmut leaves out decorated ones
                return False
            return super()._skip_node_and_children(node)

    code = path.read_text()
    wrapper = MetadataWrapper(libcst.parse_module(code))
    ignored = get_ignored_lines(str(path), code, wrapper)
    visitor = Visitor(file_mutation.mutation_operators, ignored)
    wrapper.visit(visitor)
    positions, parents = wrapper.resolve(PositionProvider), wrapper.resolve(ParentNodeProvider)

    def mutant(mutation: Any, number: int) -> Mutant:
        above = [mutation.original_node]
        while not isinstance(above[-1], libcst.Module):
            above.append(parents[above[-1]])
        definitions = (libcst.FunctionDef, libcst.ClassDef)
        top = above.index(mutation.contained_by_top_level_function)
        names = tuple(n.name.value for n in reversed(above[top:]) if isinstance(n, definitions))
        simple = [n for n in above[:top] if isinstance(n, libcst.SimpleStatementLine)]
        span = positions[simple[0] if simple else above[0]]
        return Mutant(
            name=f"{path.relative_to(ROOT)}:{'.'.join(names)}:{number}",
            path=path,
            function=names,
            lines=range(span.start.line, span.end.line + 1),
            in_parameters=any(isinstance(n, libcst.Parameters) for n in above[top - 1 : top]),
            render=lambda: wrapper.module.deep_replace(above[0], mutation.mutated_node).code,
        )

    return [
        mutant(mutation, number)
        for number, mutation in enumerate(visitor.mutations)
        if isinstance(mutation.contained_by_top_level_function, libcst.FunctionDef)
    ]


def installer(mutant: Mutant) -> Callable[[], None]:
    """What replaces the code, or the defaults, of the living function by the mutant's.

    Found and compiled before any fork, where an error ends the run. In the fork it would count as a
    failed test.
    """
    found: Any = importlib.import_module(mutant.module)
    for name in mutant.function:
        found = vars(found)[name]
    found = found.fget if isinstance(found, property) else found
    found = found.func if isinstance(found, cached_property) else found
    found = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    assert isinstance(found, FunctionType), f"{mutant.name}: no way to mutate a {type(found)}"
    source = mutant.render()
    code = compile(source, str(mutant.path), "exec", dont_inherit=True)
    changes: dict[str, Any] = {}
    if mutant.in_parameters:
        node: Any = ast.parse(source)
        for name in mutant.function:
            node = next(n for n in reversed(node.body) if getattr(n, "name", None) == name)
        given = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        value = partial(_evaluated, names=found.__globals__)
        changes["__defaults__"] = tuple(map(value, node.args.defaults))
        changes["__kwdefaults__"] = {a.arg: value(d) for a, d in given if d is not None}
    else:
        for name in mutant.function:
            inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
            code = inner[-1]
        changes["__code__"] = code

    def install() -> None:
        for name, change in changes.items():
            setattr(found, name, change)

    return install


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<default>", "eval"), names)


# ---- runs


def in_fork(work: Callable[[], bool], seconds: float) -> bool:
    """Whether `work` returns True in time, in a process group of its own without output."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end, pause = time.monotonic() + seconds, 0.002
    done, status = 0, 1
    while not done and time.monotonic() < end:
        time.sleep(pause)
        pause = min(1.3 * pause, 0.05)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        os.waitpid(pid, 0)
    return done != 0 and status == 0


class Runner:
    """A pytest plugin that runs the collected tests once for each mutant."""

    def __init__(self, state: Path, mutants: list[Mutant]):
        self.state, self.mutants = state, mutants
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed
        import torch
        import torch._dynamo  # torch imports it late, in every fork otherwise
        import torch.multiprocessing as multiprocessing

        torch.set_num_threads(1)
        start = multiprocessing.start_processes
        multiprocessing.start_processes = lambda *given, **options: start(
            *given, **options | {"start_method": "fork"}
        )
        for mutant in self.mutants:
            importlib.import_module(mutant.module)
        if not (self.state / "lines.tsv").exists():
            self._record(session.items)
        self._judge(session.items)
        return True

    def _run(self, items: list[pytest.Item]) -> bool:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return False
        return True

    def _record(self, items: list[pytest.Item]) -> None:
        """Write the lines of the mutated modules that each test runs, and its seconds."""
        paths = {str(mutant.path) for mutant in self.mutants}
        file = self.state / "lines.partial"
        for item in items:
            out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            assert in_fork(partial(self._traced, item, paths, out), 600), f"{item.nodeid} fails"
            os.close(out)
        file.rename(self.state / "lines.tsv")

    def _traced(self, item: pytest.Item, paths: set[str], out: int) -> bool:
        seen: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            place = (frame.f_code.co_filename, frame.f_lineno)
            if place[0] not in paths:
                return None
            if event == "line" and place not in seen:
                seen.add(place)
                os.write(out, f"{item.nodeid}\t{place[0]}\t{place[1]}\n".encode())
            return trace

        start = time.monotonic()
        sys.settrace(trace)
        fine = self._run([item])
        sys.settrace(None)
        os.write(out, f"{item.nodeid}\t\t{time.monotonic() - start:.3f}\n".encode())
        return fine

    def _judge(self, items: list[pytest.Item]) -> None:
        tests_of, seconds = defaultdict(set), dict[str, float]()
        for line in (self.state / "lines.tsv").read_text().splitlines():
            test, path, number = line.split("\t")
            if path:
                tests_of[path, int(number)].add(test)
            else:
                seconds[test] = float(number)
        by_name = {item.nodeid: item for item in items}
        found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        verdicts = self.state / "verdicts.tsv"
        known = verdicts.read_text() if verdicts.exists() else ""
        for mutant in self.mutants:
            if f"{mutant.name}\t" in known:
                continue
            lines = mutant.lines
            if mutant.in_parameters:  # any test of the function
                lines = range(lines.start, lines.start + 60)
            tests = set().union(*(tests_of[str(mutant.path), line] for line in lines))
            fame = found[mutant.function]
            order = sorted(tests & by_name.keys(), key=lambda t: seconds[t] / (1 + 3 * fame[t]))
            files: dict[str, list[str]] = defaultdict(list)
            for test in order:
                files[test.partition("::")[0]].append(test)
            killed = any(
                not self._survives(mutant, by_name, t, seconds, fame) for t in files.values()
            )
            with verdicts.open("a") as file:
                file.write(f"{mutant.name}\t{'killed' if killed else 'survived'}\n")
            if not killed:
                self._explain(mutant)
        counts = Counter(line.split("\t")[1] for line in verdicts.read_text().splitlines())
        print(dict(counts), f"in {verdicts}")

    def _survives(self, mutant, by_name, tests, seconds, fame) -> bool:
        killer = self.state / "killer"
        killer.unlink(missing_ok=True)
        install = installer(mutant)

        def work() -> bool:
            install()
            for test in tests:
                if not self._run([by_name[test]]):
                    killer.write_text(test)
                    return False
            return True

        fine = in_fork(work, 15 + 4 * sum(seconds[test] for test in tests))
        if killer.exists():
            fame[killer.read_text()] += 1
        return fine

    def _explain(self, mutant: Mutant) -> None:
        before, after = mutant.path.read_text().splitlines(), mutant.render().splitlines()
        changed = list(difflib.unified_diff(before, after, n=0, lineterm=""))[3:]
        with (self.state / "survivors.txt").open("a") as file:
            file.write("\n    ".join([mutant.name, *changed]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("modules")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.state.mkdir(parents=True, exist_ok=True)
    mutants = [m for module in given.modules.split(",") for m in mutants_of(ROOT / module)]
    print(f"{len(mutants)} mutants")
    if given.sample is not None:
        mutants = random.Random(given.seed).sample(mutants, given.sample)
    arguments = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", *given.tests]
    sys.exit(pytest.main(arguments, plugins=[Runner(given.state.resolve(), mutants)]))


if __name__ == "__main__":
    main()
