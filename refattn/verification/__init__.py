"""Somebody else's implementation held against refattn: :func:`verify` and :func:`assert_matches`."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn import arrays, backends
from refattn.mechanism import Function, Mechanism, functions, mechanisms
from refattn.verification.candidate import open_candidate
from refattn.verification.capabilities import SHAPE_CAPABILITIES
from refattn.verification.causes import causes_of
from refattn.verification.conventions import CONVENTION_OPTIONS, Conventions, UsageError
from refattn.verification.diagnosis import JudgedCall, Workbench, departure
from refattn.verification.limits import parse_sizes
from refattn.verification.properties import check_properties
from refattn.verification.report import Report
from refattn.verification.session import BYTES, SECONDS, Session
from refattn.verification.truth import ReferenceNaNError

__all__ = ["Conventions", "ReferenceNaNError", "Report", "UsageError", "assert_matches", "verify"]

MOST_PAIRS = 2**25
"""Pairs of queries and keys, over batch and heads, of a size of the user's own."""

DTYPES = ("float64", "float32", "float16", "bfloat16")


def verify(
    candidate: Callable[..., Any] | str,
    mechanism: str | Mechanism,
    *,
    dtypes: str | Sequence[str] = ("float32",),
    gradients: bool | None = None,
    backward: Callable[..., Any] | str | None = None,
    framework: str | None = None,
    layout: str | None = None,
    kv_layout: str | None = None,
    page: int | None = None,
    rename: Mapping[str, str] | None = None,
    supports: Sequence[str] | None = None,
    conventions: Any = None,
    options: Mapping[str, Any] | None = None,
    requires: Sequence[str] = (),
    sizes: str | None = None,
    also: str | None = None,
    thorough: bool = False,
    properties: bool = False,
    seed: int = 0,
    jobs: int = 1,
    time_limit: float = SECONDS,
    memory_limit: float = BYTES / 2**30,
    hang_budget: float = 90.0,
    backend: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Hold an implementation against a mechanism, on probes designed to make every feature visible.

    Parameters
    ----------
    candidate : callable or str
        Called as ``candidate(q, k, v, **options)``.  A callable runs in this process; a target string
        (``module:function``, ``path/file.py:function``, ``model.onnx``, ``command:...``, ``dump.safetensors``) in a child
        process with a limit of 30 s and 4 GiB per call.
    mechanism : str or Mechanism
        What it should be.
    dtypes : sequence of str
        Any of float64, float32, float16, bfloat16.
    gradients : bool, optional
        Also check gradients; default: when ``backward`` is given.
    backward : callable or str, optional
        ``backward(d_output, q, k, v, **options)``; torch and JAX candidates need none.
    framework : str, optional
        "numpy" (default), "torch", "jax", "cupy"; known signatures bring their own.
    layout : str, optional
        Axis order of q, k, v and the output; default "bhld".  "packed" and "paged": probes are dealt into sequences, and the
        candidate is called with cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, or with block_table and seq_lens.
    kv_layout : {"NHD", "HND"}, optional
        Axis order of pages; default NHD: (n, page, g, d).
    page : int, optional
        Slots of a page; left out: 16 and another size.
    rename : mapping, optional
        Names of the candidate for options of refattn.
    supports : sequence of str, optional
        The options that the candidate has, where its signature does not tell.
    conventions : str, dict or Conventions, optional
        What is by design: a preset's name or a record.
    options : mapping, optional
        Options fixed in every probe.
    requires : sequence of str
        Capabilities (``grouped_heads`` ..., options, dtypes) whose refusal is a mismatch.
    sizes : str, optional
        The only axis lengths it takes: ``"q=128n,k=128n,h=g,d=64"``.
    also : str, optional
        Axis lengths of one's own beside the others: ``"q=1,k=4096,d=128"``.
    thorough : bool
        Every triple of levels, not only every pair.
    properties : bool
        Also run the checks that need no reference.
    seed : int
        What the probes are drawn with.
    jobs : int
        Child processes that share the calls of a target string.
    time_limit, memory_limit, hang_budget : float
        Seconds and GiB of one call, and seconds of all calls together that hang.
    backend : str, optional
        Backend that computes the reference.
    progress : callable (done, total, label), optional
        Called after each call.

    Returns
    -------
    Report

    Raises
    ------
    UsageError
        Unknown mechanism, dtype, framework ..., or a target that does not load.
    ReferenceNaNError
        The reference itself has a NaN that no input explains.
    """
    chosen = _mechanism(mechanism)
    names = _dtypes(dtypes)
    fixed = _fixed(options or {}, chosen)
    _known_options("rename", rename or {}, chosen)
    _known_options("supports", supports or (), chosen)
    _check_backend(backend)
    with open_candidate(
        candidate,
        chosen,
        framework=framework,
        layout=_layout(layout, kv_layout, page),
        rename=rename,
        supports=supports,
        conventions=conventions,
        backward=backward,
        options=fixed,
        jobs=jobs,
    ) as opened:
        fixed |= {n: x for n, x in opened.conventions.fixed or () if n in chosen.options}
        accepted, why = opened.accepts(fixed)
        if not accepted:
            raise UsageError(f"options: {why}")
        wanted = opened.explicit_backward if gradients is None else gradients
        if wanted and not opened.has_backward:
            raise UsageError(
                "gradients: this candidate gives none by itself; name its backward(d_output, q, k, v, **options) with"
                " backward= (--backward TARGET)"
            )
        session = Session(
            opened,
            chosen,
            dtypes=names,
            gradients=wanted,
            fixed=fixed,
            backend=backend,
            limits=parse_sizes(sizes or ""),
            also=_also(also),
            requires=_required(requires, chosen),
            thorough=thorough,
            seed=seed,
            seconds=time_limit,
            memory=int(memory_limit * 2**30),
            progress=progress,
        )
        opened.patience.budget = hang_budget
        checked: tuple[dict[str, Any], ...] = ()
        if opened.recorded:
            session.recorded()
        else:
            session.run()
            checked = _properties(session) if properties else ()
        return _report(session, checked)


def assert_matches(candidate: Callable[..., Any] | str, mechanism: str | Mechanism, **settings: Any) -> Report:
    """:func:`verify` for tests.

    Raises
    ------
    AssertionError
        With the table of the report, unless the candidate matches.
    """
    report = verify(candidate, mechanism, **settings)
    if not report.ok:
        raise AssertionError("\n" + report.table())
    return report


def _mechanism(given: str | Function) -> Any:
    if isinstance(given, Function):
        return given
    if given in functions:
        return functions[given]
    if given not in mechanisms:
        near = difflib.get_close_matches(given, mechanisms, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(mechanisms)}"
        raise UsageError(f"there is no mechanism {given!r}{hint}")
    return mechanisms[given]


def _layout(layout: str | None, kv_layout: str | None, page: int | None) -> str | None:
    """The layout, for pages with their axis order and size."""
    if layout != "paged":
        if kv_layout is not None or page is not None:
            raise UsageError("kv_layout and page are for layout 'paged'")
        return layout
    return f"paged:{kv_layout or 'NHD'}:{'' if page is None else page}"


def _dtypes(given: str | Sequence[str]) -> tuple[str, ...]:
    names = (
        tuple(n.strip() for n in given.split(",")) if isinstance(given, str) else tuple(map(arrays.dtype_name, given))
    )
    for name in names:
        if name not in DTYPES:
            raise UsageError(f"dtypes: {name!r} is not known here; expected some of {', '.join(DTYPES)}")
    if not names:
        raise UsageError(f"dtypes is empty; expected some of {', '.join(DTYPES)}")
    return names


def _fixed(options: Mapping[str, Any], mechanism: Mechanism) -> dict[str, Any]:
    """The options that go into every probe; lists are tuples here."""
    _known_options("options", options, mechanism)
    for name in options:
        if name in CONVENTION_OPTIONS:
            raise UsageError(
                f"options: {name} is a convention, not an option: conventions={{{name!r}: ...}} declares it"
            )
    return {n: tuple(x) if isinstance(x, list) else x for n, x in options.items()}


def _known_options(what: str, names: Iterable[str], mechanism: Mechanism) -> None:
    """Raise UsageError for a name that is no option of the mechanism."""
    known = [n for n in mechanism.options if what == "rename" or n not in mechanism.positional]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{what}: {mechanism.name} has no option {name!r}{hint}")


def _check_backend(name: str | None) -> None:
    """Raise UsageError unless the backend can serve NumPy arrays."""
    try:
        backends.resolve(name, np)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UsageError(f"backend: {error}") from None


def _also(text: str | None) -> dict[str, int]:
    """Axis lengths of the user's own; refused where the truth of all rows would not fit into memory."""
    limits = parse_sizes(text or "")
    if limits.multiples or limits.equal or any(len(x) > 1 for x in limits.only.values()):
        raise UsageError(f"also: {text!r}: expected one number for each letter")
    sizes = {n: x[0] for n, x in limits.only.items()}
    pairs = math.prod(sizes.get(n, d) for n, d in (("b", 1), ("h", 1), ("q", 1), ("k", 1), ("t", 1)))
    if pairs * sizes.get("t", 1) > MOST_PAIRS:
        raise UsageError(f"also: {text} has {pairs:,} pairs of queries and keys: at most {MOST_PAIRS:,} are judged")
    return sizes


def _required(names: Sequence[str], mechanism: Mechanism) -> tuple[str, ...]:
    known = (*SHAPE_CAPABILITIES, *DTYPES, *mechanism.options)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise UsageError(f"requires: there is no capability {name!r}{hint}")
    return tuple(names)


def _properties(session: Session) -> tuple[dict[str, Any], ...]:
    candidate = session.candidate
    found = check_properties(
        session.mechanism, candidate.run, session.dtypes[0], lambda names: candidate.accepts(names)[0]
    )
    if not found:
        session.notes.append("no check without a reference applies here")
    return tuple(found)


def _report(session: Session, checked: tuple[dict[str, Any], ...]) -> Report:
    """What was found, explained."""
    candidate = session.candidate
    for row in session.rows:
        if row.status == "timeout":
            session.explain("hang", f"no answer within {session.seconds:g} s", (), row.probe)
    bench = Workbench(session.mechanism, candidate.conventions)
    live = session if candidate.abilities.values else None
    causes = causes_of(session.cases, bench, live=live, structural=session.structural)
    departs = departure(session.cases, bench, causes.mistakes, live)
    explanations = causes.records
    notes = list(session.notes)
    if any(row.status == "mismatch" for row in session.rows) and not explanations:
        notes += _structure(session.cases)
    if candidate.where == "this process":
        notes.append("the candidate ran in this process: a crash or a hang would have ended it")
    place = {dtype: i for i, dtype in enumerate(("", *session.dtypes))}
    rows = sorted(session.rows, key=lambda r: place.get(r.dtype, len(place)))
    return Report(
        session.mechanism.name,
        candidate.describe(),
        tuple(rows),
        explanations,
        tuple(notes),
        checked,
        departs.as_record(),
        tuple(departs.sentences),
    )


def _structure(cases: Sequence[JudgedCall]) -> list[str]:
    """What the errors look like, where nothing in the catalogue explains them."""
    failing = sorted((c for c in cases if c.failing), key=lambda c: c.size)
    sentences = ["no mistake of the catalogue and no other convention explains the mismatch"]
    outputs = [c.got["output"].astype(np.float64) for c in cases if "output" in c.got]
    if outputs and all(not x.any() for x in outputs):
        sentences.append("the output is zero everywhere")
    for name in ("q", "v"):
        same = [
            np.array_equal(c.got["output"], c.truth.question.arrays[name])
            for c in cases
            if "output" in c.got and c.truth.question.arrays.get(name) is not None
        ]
        if same and any(same):
            sentences.append(f"the output is the input {name} where the shapes allow it")
    for case in failing[:1]:
        for j in case.judgements:
            if not j.ok:
                sentences.append(f"smallest failing probe {case.probe} ({case.dtype}): {j.array}: {j.says}")
    return sentences
