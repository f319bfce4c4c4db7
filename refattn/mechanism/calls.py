"""One call of a Function: arguments checked, one namespace, the compute dtype, and gradients back in the callers' shapes."""

import inspect
from collections.abc import Callable
from typing import Any

from refattn import arrays
from refattn.records import Result

__all__ = ["ALGORITHMS", "COMMON", "Call", "check_of"]

COMMON = ("backend", "compute_dtype", "algorithm")
ALGORITHMS = ("auto", "whole", "tiled")


class Call:
    """One call: bound arguments, namespace, dtypes; shared by forward and its pullback."""

    def __init__(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owner = owner
        kwargs = dict(kwargs)
        backend, compute, algorithm = (kwargs.pop(n, d) for n, d in zip(COMMON, (None, None, "auto"), strict=True))
        self.given = owner.bind(args, kwargs)
        for name, check in owner._plain.items():
            if self.given.get(name) is not None:
                self.given[name] = check(name, self.given[name])
        arrays.require_one_of("algorithm", algorithm, ALGORITHMS)
        found = [x for x in self.given.values() if arrays.is_array(x)]
        if not found:
            raise TypeError(f"{owner.name}: no array among the arguments ({', '.join(self.given)})")
        try:
            self.xp = arrays.namespace(*found)
        except TypeError as error:
            kinds = ", ".join(
                f"{n} is a {type(x).__module__}.{type(x).__name__}" for n, x in self.given.items() if arrays.is_array(x)
            )
            raise TypeError(f"{owner.name}: {error} ({kinds})") from None
        self._check_types(compute)
        self.dtype, self.compute = self._dtypes(compute)
        self.extra = self._extra(backend, algorithm)

    def _check_types(self, compute: Any) -> None:
        owner = self.owner
        for name in owner._floating:
            x = self.given.get(name)
            if x is None:
                continue
            if isinstance(x, (float, int)) and not isinstance(x, bool):
                default = owner._signature.parameters[name].default
                if name not in ("scale", "softcap") and (
                    isinstance(default, bool) or not isinstance(default, (float, int))
                ):
                    raise TypeError(f"{owner.name}: {name} is {x!r}: expected an array")
                continue
            if not arrays.is_array(x):
                if isinstance(x, complex) and compute is not None:
                    continue
                kind = type(x).__name__
                raise TypeError(f"{owner.name}: {name} is a {kind}: expected a floating-point array or a number")
            if arrays.is_complex(x.dtype):
                if compute is None or not arrays.is_complex(compute):
                    raise TypeError(
                        f"{owner.name}: {name} is complex ({arrays.dtype_name(x.dtype)}); complex arguments are taken only"
                        " with compute_dtype='complex128' (the complex-step derivative)"
                    )
            elif not arrays.is_real_floating(x.dtype):
                raise TypeError(
                    f"{owner.name}: {name} has dtype {arrays.dtype_name(x.dtype)} and shape {tuple(x.shape)}:"
                    " expected a floating-point array"
                )

    def _dtypes(self, compute: Any) -> tuple[Any, Any]:
        primary = [self.given[n] for n in self.owner._primary if arrays.is_array(self.given.get(n))]
        primary = primary or [x for n in self.owner._floating if arrays.is_array(x := self.given.get(n))]
        if not primary:
            return None, None
        dtype = primary[0].dtype
        for x in primary[1:]:
            dtype = _wider(dtype, x.dtype, self.xp)
        if compute is not None:
            named = _named_dtype(compute, self.xp)
            return (named if arrays.is_complex(named) else dtype), named
        return dtype, self.xp.float32 if arrays.is_half(dtype) else dtype

    def _extra(self, backend: Any, algorithm: str) -> dict[str, Any]:
        from refattn import backends

        chosen = backends.resolve(backend, self.xp)
        if "backend" not in self.owner._wants and chosen.fused:
            raise ValueError(f"{self.owner.name} is not served by the fused backend {chosen.name!r}; leave backend out")
        values = {"backend": chosen, "algorithm": algorithm}
        return {n: values[n] for n in self.owner._wants}

    def run(self) -> tuple[Result, Any]:
        arguments = dict(self.given)
        if self.compute is not None:
            for name in self.owner._floating:
                x = arguments.get(name)
                if x is not None and arrays.is_array(x) and x.dtype != self.compute:
                    arguments[name] = self.xp.astype(x, self.compute)
        return self.owner._forward(**arguments, **self.extra)

    def stored(self, result: Result) -> Result:
        """The results as the caller gets them: outputs in the dtype of the inputs."""
        fields = dict(result.fields)
        for name in self.owner._storage:
            x = fields.get(name)
            if x is not None and arrays.is_array(x) and self.dtype is not None and x.dtype != self.dtype:
                fields[name] = self.xp.astype(x, self.dtype)
        return Result(**fields)

    def pull(self, saved: Any, stored: Result, cotangents: dict[str, Any]) -> dict[str, Any]:
        owner, xp = self.owner, self.xp
        full: dict[str, Any] = dict.fromkeys(owner.outputs)
        for name, d in cotangents.items():
            if name not in owner.outputs:
                raise TypeError(
                    f"{owner.name}: {name!r} has no cotangent; the differentiable results are {', '.join(owner.outputs)}"
                )
            if d is None:
                continue
            if not arrays.is_array(d) or arrays.namespace(d) is not xp:
                raise TypeError(
                    f"{owner.name}: the cotangent of {name} is a {type(d).__name__}: expected an array of the inputs' library"
                )
            want = tuple(getattr(stored, name).shape)
            if tuple(d.shape) != want:
                raise ValueError(f"{owner.name}: the cotangent of {name} has shape {tuple(d.shape)}: expected {want}")
            complex_ok = self.compute is not None and arrays.is_complex(self.compute)
            if not (arrays.is_real_floating(d.dtype) or (complex_ok and arrays.is_complex(d.dtype))):
                raise TypeError(
                    f"{owner.name}: the cotangent of {name} has dtype {arrays.dtype_name(d.dtype)}: expected floating point"
                )
            full[name] = xp.astype(d, self.compute) if d.dtype != self.compute else d
        gradients = {} if owner._backward is None else owner._backward(saved, **full)
        finished = {}
        for name in owner.differentiable:
            x = self.given.get(name)
            if x is None:
                continue
            g = gradients.get(name)
            shape = tuple(x.shape) if arrays.is_array(x) else ()
            dtype = x.dtype if arrays.is_array(x) and not arrays.is_complex(self.compute) else self.compute
            if g is None:
                g = xp.zeros(
                    shape, dtype=dtype, device=arrays.device(next(a for a in self.given.values() if arrays.is_array(a)))
                )
            g = arrays.sum_to_shape(g, shape)
            finished[name] = xp.astype(g, dtype) if g.dtype != dtype else g
        return finished


def check_of(parameter: inspect.Parameter) -> Callable[[str, Any], Any] | None:
    """The check of a plain argument, by its annotation, or by its default where it has none."""
    annotation = parameter.annotation
    if annotation is parameter.empty and isinstance(parameter.default, (bool, float)):
        annotation = type(parameter.default)
    if annotation is bool:
        return arrays.require_flag
    if annotation in (int, int | None):
        return arrays.require_integer
    if annotation in (float, float | None):
        return _number
    return None


def _number(name: str, value: Any) -> Any:
    arrays.require_finite(name, value)
    return value


def _wider(a: Any, b: Any, xp: Any) -> Any:
    if a == b:
        return a
    if arrays.is_half(a) and arrays.is_half(b):
        return xp.float32
    if arrays.is_half(a) or arrays.is_half(b):
        return b if arrays.is_half(a) else a
    return xp.result_type(a, b)


def _named_dtype(compute: Any, xp: Any) -> Any:
    name = arrays.dtype_name(compute)
    if not (arrays.is_real_floating(name) or arrays.is_complex(name)):
        raise TypeError(f"compute_dtype is {compute!r}: expected a floating-point dtype")
    found = arrays.named_dtype(name, xp)
    if found is None:
        raise TypeError(f"compute_dtype is {compute!r}: {xp.__name__} has no such dtype")
    return found
