"""The command line: ``refattn verify``, ``discover``, ``list``, ``show``, ``cost``, ``backends``, ``probes``.

Data goes to standard output, progress to standard error.  Exit status: 0 matches, 1 mismatch, 2 usage, 3 the candidate's
process crashed, hung or ran out of memory, 4 nothing was checked; 70 an error of refattn itself.

Everything heavy is imported inside the command that needs it.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import secrets
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

SCHEMA = 1
"""Version of the JSON that the commands print."""

_EVERYWHERE = ("backend", "compute_dtype", "algorithm")
_USAGE, _INTERNAL, _INTERRUPTED = 2, 70, 130


@dataclasses.dataclass(frozen=True)
class Setting:
    """One option.

    Attributes
    ----------
    flag, metavar, says
        As the command line shows it.
    keyword
        The keyword of :func:`refattn.verify` that it becomes.
    kind
        How its text is read: "text", "flag", "names" (a,b), "renames" (a=b,c=d), "object" (a JSON object),
        "conventions", "count", "number".
    shared
        Whether ``refattn discover`` has it too.
    """

    flag: str
    keyword: str
    kind: str
    metavar: str
    says: str
    shared: bool = False


VERIFY_OPTIONS: tuple[Setting, ...] = (
    Setting("--framework", "framework", "text", "NAME", "numpy (default), torch, jax, cupy or torch:<device>", True),
    Setting(
        "--layout",
        "layout",
        "text",
        "AXES",
        "axis order of q, k, v and the output: bhld or a permutation; packed; paged",
        True,
    ),
    Setting("--kv-layout", "kv_layout", "text", "NHD|HND", "axis order of pages (--layout paged)"),
    Setting("--page", "page", "count", "N", "slots of a page (--layout paged; default: 16 and another size)"),
    Setting("--rename", "rename", "renames", "a=b,...", "its names for refattn's options: ours=theirs", True),
    Setting("--supports", "supports", "names", "A,B", "the options and conventions it has, said by hand", True),
    Setting("--conventions", "conventions", "conventions", "PRESET|JSON|FILE", "what is by design", True),
    Setting("--dtype", "dtypes", "names", "A,B", "storage dtypes of the arrays (float32,bfloat16 ...)"),
    Setting("--gradients", "gradients", "flag", "", "check gradients too (torch and JAX need no --backward)"),
    Setting("--backward", "backward", "text", "TARGET", "backward(d_output, q, k, v, **options); implies --gradients"),
    Setting("--options", "options", "object", "JSON", "options fixed in every probe"),
    Setting("--requires", "requires", "names", "A,B", "capabilities whose refusal is a mismatch (grouped_heads ...)"),
    Setting("--sizes", "sizes", "text", "q=128n,h=g,d=64", "the only axis lengths it takes"),
    Setting("--also", "also", "text", "q=1,k=4096", "axis lengths of one's own, beside the others"),
    Setting("--thorough", "thorough", "flag", "", "every triple of features, not only every pair"),
    Setting("--properties", "properties", "flag", "", "also check properties that need no reference"),
    Setting("--seed", "seed", "number", "N", "what the probes are drawn with (default: drawn, and printed)"),
    Setting("--jobs", "jobs", "count", "N", "child processes that share the probes"),
    Setting("--backend", "backend", "text", "NAME", "backend that computes the reference"),
    Setting("--time-limit", "time_limit", "positive", "S", "seconds of one call (30)"),
    Setting("--memory-limit", "memory_limit", "positive", "GIB", "memory of one call beyond the start (4)"),
    Setting("--hang-budget", "hang_budget", "positive", "S", "seconds of all calls together that hang (90)"),
)
"""What `refattn verify` takes beside target and mechanism: the owner of names and words, in the order of the help."""


class _Usage(Exception):
    """A request that cannot be carried out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        if _is_usage(error):
            print(f"refattn: {error}", file=sys.stderr)
            return _USAGE
        traceback.print_exc()
        print("refattn: this is an error of refattn, not a verdict on the candidate", file=sys.stderr)
        return _INTERNAL


def _is_usage(error: Exception) -> bool:
    if isinstance(error, _Usage):
        return True
    errors = sys.modules.get("refattn.verification.errors")
    return errors is not None and isinstance(error, errors.UsageError)


# ---------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    import refattn

    parser = argparse.ArgumentParser(
        prog="refattn", description="Reference attention mechanisms, and the tool that holds kernels against them."
    )
    parser.add_argument("--version", action="version", version=f"refattn {refattn.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    verify = commands.add_parser(
        "verify",
        help="hold an implementation against the reference",
        description="Hold an implementation against the reference: designed probes, a verdict in units of a rounding bound, "
        "where it goes wrong and which mistake explains it.",
        epilog="Exit status: 0 matches, 1 mismatch, 2 usage, 3 the candidate's process crashed, hung or ran out of memory, "
        "4 nothing was checked.",
    )
    _target(verify)
    for setting in VERIFY_OPTIONS:
        _add(verify, setting)
    for kind, form in _REPORTS.items():
        verify.add_argument(f"--{kind}", metavar="FILE", help=f"write the report as {form}")
    verify.add_argument("--brief", action="store_true", help="print the verdict and its causes alone")
    verify.add_argument("-v", "--verbose", action="store_true", help="print every array of every call")
    verify.set_defaults(command=_verify)

    discover = commands.add_parser(
        "discover",
        help="the conventions that an implementation follows",
        description="Find out which conventions an implementation follows and print them as a record for --conventions.",
    )
    _target(discover)
    for setting in VERIFY_OPTIONS:
        if setting.shared:
            _add(discover, setting)
    discover.set_defaults(command=_discover)

    for name, command, says in (
        ("list", _list, "the mechanisms there are"),
        ("backends", _backends, "what runs on this machine, and why the rest does not"),
    ):
        one = commands.add_parser(name, help=says, description=says)
        _as_json(one)
        one.set_defaults(command=command)

    for name, command, says in (
        ("show", _show, "one mechanism: equation, axes, options, paper, known mistakes"),
        ("probes", _probes, "the probes that a mechanism is verified with"),
    ):
        one = commands.add_parser(name, help=says, description=says)
        one.add_argument("name", metavar="NAME", help="a mechanism (see `refattn list`)")
        if name == "probes":
            one.add_argument("--thorough", action="store_true", help="every triple of features, not only every pair")
        _as_json(one)
        one.set_defaults(command=command)

    cost = commands.add_parser(
        "cost",
        help="operations and bytes of one call",
        description="Exact operation and byte counts of one call.",
        epilog="Example: refattn cost scaled_dot_product_attention b=1 h=8 q=512 k=512 d=64 e=64 dtype=float32 direction=both",
    )
    cost.add_argument("name", metavar="NAME", help="a mechanism (see `refattn list`)")
    cost.add_argument(
        "sizes", nargs="*", type=_assignment, metavar="KEY=VALUE", help="sizes by axis letter, dtype, options"
    )
    _as_json(cost)
    cost.set_defaults(command=_cost)
    return parser


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:function, path/file.py:function, model.onnx, dump.safetensors or 'command:./program {inputs} {outputs}'",
    )
    parser.add_argument(
        "--mechanism",
        required=True,
        metavar="NAME",
        help="a mechanism (see `refattn list`), or module:name of one's own",
    )


def _add(parser: argparse.ArgumentParser, setting: Setting) -> None:
    if setting.kind == "flag":
        parser.add_argument(setting.flag, dest=setting.keyword, action="store_true", help=setting.says)
        return
    parser.add_argument(
        setting.flag, dest=setting.keyword, type=_KINDS[setting.kind], metavar=setting.metavar, help=setting.says
    )


def _as_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _names(text: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in text.split(",") if n.strip())


def _renames(text: str) -> dict[str, str]:
    pairs = [n.partition("=") for n in _names(text)]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: expected ours=theirs,...")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a JSON object")
    return {n: tuple(x) if isinstance(x, list) else x for n, x in value.items()}


def _conventions(text: str) -> str | dict[str, Any]:
    """A preset's name, a JSON object, or a file that holds one (what ``refattn discover`` prints)."""
    if text.lstrip().startswith("{"):
        return _json_object(text)
    if text.endswith(".json") or Path(text).is_file():
        try:
            return _json_object(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error.strerror}") from None
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


_KINDS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "names": _names,
    "renames": _renames,
    "object": _json_object,
    "conventions": _conventions,
    "count": _positive,
    "number": _natural,
    "positive": _above_zero,
}
_REPORTS = {"json": "JSON", "junit": "JUnit XML", "html": "HTML"}


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = {"True": True, "False": False, "None": None}.get(value, value)
    return name, tuple(parsed) if isinstance(parsed, list) else parsed


def _mechanism(name: str, *, functions: bool = False) -> Any:
    """The mechanism of this name; a function around attention too, by its dotted name, where it serves."""
    import refattn

    if ":" in name:
        from refattn.verification.candidate.targets import load_function

        found = load_function(name)
        if not isinstance(found, type(refattn.scaled_dot_product_attention)):
            raise _Usage(f"{name} is a {type(found).__name__}, not a mechanism")
        return found
    if functions and name in refattn.functions:
        return refattn.functions[name]
    if name not in refattn.mechanisms:
        near = difflib.get_close_matches(name, refattn.mechanisms, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`refattn list` prints all of them"
        raise _Usage(f"there is no mechanism {name!r}; {hint}")
    return refattn.mechanisms[name]


# ---------------------------------------------------------------------- printing


def _print(arguments: argparse.Namespace, data: dict[str, Any], text: Sequence[str]) -> int:
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, **data}, indent=2))
    else:
        print("\n".join(text))
    return 0


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, all columns but the last padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *first, last in rows:
        lines.append("  ".join([x.ljust(w) for x, w in zip(first, widths, strict=False)] + [last]).rstrip())
    return lines


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, else a line for each quarter of the way; both on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("probes", total=None)
            yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)
        return
    last = (0, 0)

    def show(done: int, total: int, label: str) -> None:
        nonlocal last
        quarter = (total, 4 * done // max(total, 1))
        if quarter != last and quarter[1] > 0:
            print(f"refattn: {done} of {total} calls ({label})", file=sys.stderr, flush=True)
        last = quarter

    yield show


# ---------------------------------------------------------------------- commands


def _verify(arguments: argparse.Namespace) -> int:
    mechanism = _mechanism(arguments.mechanism, functions=True)
    files = {kind: getattr(arguments, kind) for kind in _REPORTS if getattr(arguments, kind)}
    for kind, path in files.items():
        _check_writable(kind, path)
    from refattn.verification import verify

    given = {setting.keyword: getattr(arguments, setting.keyword) for setting in VERIFY_OPTIONS}
    asked = {n: x for n, x in given.items() if x not in (None, False)}
    asked.setdefault("seed", secrets.randbelow(10**6))
    asked["gradients"] = given["gradients"] or given["backward"] is not None
    with _progress() as progress:
        report = verify(arguments.target, mechanism, progress=progress, **asked)
    width = shutil.get_terminal_size((100, 24)).columns
    print(report.table(full=arguments.verbose, brief=arguments.brief, width=width))
    for kind, path in files.items():
        getattr(report, f"to_{kind}")(path)
    return report.exit_code


def _check_writable(kind: str, path: str) -> None:
    """Raise before the run where a report could not be written after it."""
    place = Path(path)
    folder = place.parent
    if place.is_dir() or not folder.is_dir() or not os.access(place if place.exists() else folder, os.W_OK):
        reason = (
            "is a folder"
            if place.is_dir()
            else "cannot be written"
            if folder.is_dir()
            else f"needs the folder {folder}"
        )
        raise _Usage(f"--{kind} {path} {reason}")


def _discover(arguments: argparse.Namespace) -> int:
    mechanism = _mechanism(arguments.mechanism)
    from refattn.verification.candidate import open_candidate
    from refattn.verification.discover import discover

    asked = {s.keyword: getattr(arguments, s.keyword) for s in VERIFY_OPTIONS if s.shared}
    with open_candidate(arguments.target, mechanism, **asked) as candidate:
        found, undecided = discover(candidate, mechanism)
    for field, why in undecided.items():
        print(f"refattn: {field} is open: {why}", file=sys.stderr)
    print(json.dumps(found.declared(), indent=2))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    import refattn

    found = list(refattn.mechanisms.values())
    rows = [(m.name, m.title) for m in found]
    data = [{"name": m.name, "title": m.title, "equation": m.equation} for m in found]
    return _print(arguments, {"mechanisms": data}, _columns(rows) if rows else [])


def _show(arguments: argparse.Namespace) -> int:
    mechanism = _mechanism(arguments.name)
    positional, options = [], {}
    for name, parameter in inspect.signature(mechanism).parameters.items():
        if name in _EVERYWHERE:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[name] = None if parameter.default is parameter.empty else parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(name)
    mutations = [(m.class_, m.says) for m in mechanism.mutations]
    data = {
        "name": mechanism.name,
        "equation": mechanism.equation,
        "paper": mechanism.paper,
        "axes": dict(mechanism.axes),
        "arrays": positional,
        "options": {n: repr(x) for n, x in options.items()},
        "differentiable": list(mechanism.differentiable),
        "outputs": list(mechanism.outputs),
        "mutations": [{"class": n, "says": says} for n, says in mutations],
    }
    indent = "  {}".format
    text = [mechanism.name, "", *map(indent, mechanism.equation.splitlines()), "", f"paper: {mechanism.paper}"]
    text += [f"arrays: {', '.join(positional)}", f"differentiable: {', '.join(mechanism.differentiable)}"]
    text += [f"results that take a cotangent: {', '.join(mechanism.outputs)}"]
    text += ["", "axes", *map(indent, _columns(list(mechanism.axes.items())))]
    text += ["", "options and their defaults", *map(indent, _columns([(n, repr(x)) for n, x in options.items()]))]
    text += [indent(f"and, like every mechanism: {', '.join(_EVERYWHERE)}")]
    if mutations:
        text += ["", "known mistakes", *map(indent, _columns(mutations))]
    return _print(arguments, data, text)


def _cost(arguments: argparse.Namespace) -> int:
    mechanism = _mechanism(arguments.name)
    sizes = dict(arguments.sizes)
    try:
        cost = mechanism.cost(**sizes)
    except (TypeError, ValueError) as error:
        raise _Usage(f"cost of {mechanism.name}: {error}") from None
    counts = {"flops": cost.flops, **dataclasses.asdict(cost)}
    rows = [(n, f"{x:>{max(len(f'{y:,}') for y in counts.values())},}") for n, x in counts.items()]
    return _print(arguments, {"name": mechanism.name, "sizes": sizes, "cost": counts}, _columns(rows))


def _backends(arguments: argparse.Namespace) -> int:
    from refattn import backends

    found = backends.capabilities()
    rows = [
        (c.name, "usable" if c.usable else "not usable", "fused kernels" if c.fused else "array operations", c.reason)
        for c in found
    ]
    return _print(arguments, {"backends": [dataclasses.asdict(c) for c in found]}, _columns(rows))


def _probes(arguments: argparse.Namespace) -> int:
    mechanism = _mechanism(arguments.name)
    from refattn.verification.probes import Plan

    plan = Plan(mechanism, thorough=arguments.thorough)
    made = plan.build_all(plan.alone())
    made += plan.rest(made)
    table = plan.table(made, 3 if arguments.thorough else 2)
    size = "triples" if arguments.thorough else "pairs"
    data = {
        "name": mechanism.name,
        "probes": [
            {"name": p.name, "options": list(p.options), "features": dict(p.features), "says": p.says} for p in made
        ],
        "pairs": [{"levels": [f"{n}={x}" for n, x in pair], "probe": probe} for pair, probe in table.items()],
    }
    text = _columns([(p.name, p.says) for p in made])
    text += ["", f"{size} of levels, and the probe in which each stands", ""]
    text += _columns([(*(f"{n} {x}" for n, x in pair), probe or "IN NONE") for pair, probe in table.items()])
    uncovered = sum(not probe for probe in table.values())
    text += ["", f"{len(made)} probes; {len(table)} {size}, {uncovered} of them in none"]
    return _print(arguments, data, text)


if __name__ == "__main__":
    sys.exit(main())
