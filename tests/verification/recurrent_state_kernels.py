"""Independent kernels of the recurrences for the verifier's tests: right ones, and broken ones.

Nothing here comes from refattn: plain loops over tokens, the state carried along and its cotangent carried back.  Each flag
breaks one step.  Signatures are small: equal head counts, one kind of decay.
"""

import numpy as np


def wide(*arrays):
    return [x.astype(np.float32 if x.dtype.itemsize < 4 else x.dtype) for x in arrays]


def start_of(state, k, v):
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    return np.zeros(shape, np.result_type(k, v)) if state is None else state.astype(np.result_type(k, v))


def gated(broken=""):
    """Simple GLA: f(q, k, v, *, decay, scale, state)."""

    def run(q, k, v, *, decay, scale=None, state=None):
        out_type = q.dtype
        q, k, v, decay = wide(q, k, v, decay)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        s = start_of(None if broken == "state_ignored" else state, k, v)
        rows = []
        for t in range(q.shape[-2]):
            gamma = decay[..., t, None, None]
            factor = np.exp2(gamma) if broken == "decay_base" else np.exp(gamma)
            if broken == "decay_first_step" and t == 0:
                factor = np.ones_like(factor)
            if broken == "state_lost_at_chunk" and t and t % 64 == 0:
                s = np.zeros_like(s)
            new = k[..., t, :, None] * v[..., t, None, :]
            s = factor * (s + new) if broken == "decay_order" else factor * s + new
            rows.append(np.einsum("...d,...de->...e", scale * q[..., t, :], s))
        return np.stack(rows, -2).astype(out_type), s

    def back(d_output, q, k, v, *, d_state=None, decay, scale=None, state=None):
        kinds = [x.dtype for x in (q, k, v, decay)]
        q, k, v, decay, d_output = wide(q, k, v, decay, d_output)
        given, scale = scale, q.shape[-1] ** -0.5 if scale is None else scale
        s = start_of(None if broken == "state_ignored" else state, k, v)
        ln = np.log(2) if broken == "decay_base" else 1.0
        after, before = [], []
        for t in range(q.shape[-2]):
            if broken == "state_lost_at_chunk" and t and t % 64 == 0:
                s = np.zeros_like(s)
            before.append(s)
            factor = np.exp(ln * decay[..., t, None, None]) * (
                1 if not (broken == "decay_first_step" and t == 0) else 0
            )
            factor = factor + (1.0 if broken == "decay_first_step" and t == 0 else 0.0)
            new = k[..., t, :, None] * v[..., t, None, :]
            s = factor * (s + new) if broken == "decay_order" else factor * s + new
            after.append((s, factor))
        ds = np.zeros_like(s) if d_state is None or broken == "state_cotangent" else d_state.astype(s.dtype)
        d_q, d_k, d_v, d_decay, d_scale = (np.zeros_like(x) for x in (q, k, v, decay, np.zeros(())))
        for t in range(q.shape[-2] - 1, -1, -1):
            s, factor = after[t]
            own = np.einsum("...de,...e->...d", s, d_output[..., t, :])
            d_q[..., t, :] = scale * own
            d_scale = d_scale + np.sum(own * q[..., t, :])
            ds = ds + scale * q[..., t, :, None] * d_output[..., t, None, :]
            d_new = factor * ds if broken == "decay_order" else ds
            d_k[..., t, :] = np.einsum("...de,...e->...d", d_new, v[..., t, :])
            d_v[..., t, :] = np.einsum("...de,...d->...e", d_new, k[..., t, :])
            kept = s if broken == "decay_order" else factor * before[t]
            d_decay[..., t] = ln * np.sum(ds * kept, axis=(-1, -2))
            if broken == "decay_first_step" and t == 0:
                d_decay[..., t] = 0
            ds = factor * ds
            if broken == "state_lost_at_chunk" and t and t % 64 == 0:
                ds = np.zeros_like(ds)
        found = [x.astype(kind) for x, kind in zip((d_q, d_k, d_v, d_decay), kinds, strict=True)]
        if given is not None:
            found.append(d_scale)
        if state is not None:
            found.append(
                (np.zeros_like(ds) if broken in ("state_ignored", "initial_state_grad") else ds).astype(state.dtype)
            )
        return tuple(found)

    return run, back


def delta(broken=""):
    """Gated DeltaNet: f(q, k, v, *, beta, decay, state)."""

    def step(s, t, k, v, beta, decay):
        old = np.exp(decay[..., t, None, None]) * s
        source = s if broken == "decay_order" else old
        read = np.einsum("...de,...d->...e", source, k[..., t, :])
        b = beta[..., t, None] ** (2 if broken == "beta_twice" else 1)
        write, erase = b, (np.ones_like(b) if broken == "beta_on_value_only" else b)
        erase = np.zeros_like(b) if broken == "erase_dropped" else erase
        u = write * v[..., t, :] - erase * read
        return old, read, write, erase, u, old + k[..., t, :, None] * u[..., None, :]

    def run(q, k, v, *, beta, decay, state=None):
        out_type = q.dtype
        q, k, v, beta, decay = wide(q, k, v, beta, decay)
        s, rows = start_of(state, k, v), []
        for t in range(q.shape[-2]):
            *_, s = step(s, t, k, v, beta, decay)
            rows.append(np.einsum("...d,...de->...e", q[..., t, :] * q.shape[-1] ** -0.5, s))
        return {"output": np.stack(rows, -2).astype(out_type), "state": s}

    def back(d_output, q, k, v, *, d_state=None, beta, decay, state=None):
        kinds = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}
        q, k, v, beta, decay, d_output = wide(q, k, v, beta, decay, d_output)
        s, saved, scale = start_of(state, k, v), [], q.shape[-1] ** -0.5
        for t in range(q.shape[-2]):
            saved.append((s, *step(s, t, k, v, beta, decay)))
            s = saved[-1][-1]
        ds = np.zeros_like(s) if d_state is None else d_state.astype(s.dtype)
        g = {n: np.zeros_like(x) for n, x in (("q", q), ("k", k), ("v", v), ("beta", beta), ("decay", decay))}
        for t in range(q.shape[-2] - 1, -1, -1):
            entry, old, read, write, erase, u, s = saved[t]
            g["q"][..., t, :] = scale * np.einsum("...de,...e->...d", s, d_output[..., t, :])
            ds = ds + scale * q[..., t, :, None] * d_output[..., t, None, :]
            du = np.einsum("...de,...d->...e", ds, k[..., t, :])
            g["v"][..., t, :] = write * du
            d_read = -erase * du
            share = {"beta_on_value_only": v[..., t, :], "erase_dropped": v[..., t, :]}.get(broken, v[..., t, :] - read)
            d_beta = np.sum(du * share, -1) * (2 * beta[..., t] if broken == "beta_twice" else 1)
            g["beta"][..., t] = d_beta
            source = entry if broken == "decay_order" else old
            dk = np.einsum("...de,...e->...d", ds, u)
            if broken != "dk_shared_pair":
                dk = dk + np.einsum("...de,...e->...d", source, d_read)
            g["k"][..., t, :] = dk
            through = k[..., t, :, None] * d_read[..., None, :]
            if broken == "d_state_erase":
                through = np.zeros_like(through)
            d_old = ds if broken == "decay_order" else ds + through
            g["decay"][..., t] = np.sum(d_old * old, axis=(-1, -2))
            ds = np.exp(decay[..., t, None, None]) * d_old + (through if broken == "decay_order" else 0)
        found = {n: x.astype(kinds[n].dtype) for n, x in g.items()}
        return found if state is None else {**found, "state": ds.astype(state.dtype)}

    return run, back


def rwkv7(broken=""):
    """RWKV-7's core: f(q, k, v, *, remove, replace, channel_decay, state)."""

    def step(s, t, k, v, a, b, decay):
        old = np.exp(decay[..., t, :, None]) * s
        read = np.einsum("...de,...d->...e", old if broken == "decay_order" else s, a[..., t, :])
        return old, read, old + b[..., t, :, None] * read[..., None, :] + k[..., t, :, None] * v[..., t, None, :]

    def prepare(remove, replace, channel_decay):
        a, b, decay = wide(remove, replace, channel_decay)
        if broken == "remove_replace":
            a, b = b, a
        if broken == "erase_dropped":
            a = 0 * a
        if broken == "decay_channel_shared":
            decay = np.broadcast_to(decay[..., :1], decay.shape)
        if broken == "gate_raw":
            decay = -np.exp(decay)
        return a, b, decay

    def run(q, k, v, *, remove, replace, channel_decay, state=None):
        out_type = q.dtype
        q, k, v = wide(q, k, v)
        a, b, decay = prepare(remove, replace, channel_decay)
        s, rows = start_of(state, k, v), []
        for t in range(q.shape[-2]):
            *_, s = step(s, t, k, v, a, b, decay)
            rows.append(np.einsum("...d,...de->...e", q[..., t, :], s))
        return np.stack(rows, -2).astype(out_type), s

    def back(d_output, q, k, v, *, d_state=None, remove, replace, channel_decay, state=None):
        kinds = {"q": q, "k": k, "v": v, "remove": remove, "replace": replace, "channel_decay": channel_decay}
        q, k, v, d_output = wide(q, k, v, d_output)
        a, b, decay = prepare(remove, replace, channel_decay)
        s, saved = start_of(state, k, v), []
        for t in range(q.shape[-2]):
            saved.append((s, *step(s, t, k, v, a, b, decay)))
            s = saved[-1][-1]
        ds = np.zeros_like(s) if d_state is None else d_state.astype(s.dtype)
        names = ("q", "k", "v", "remove", "replace", "channel_decay")
        g = {n: np.zeros_like(x) for n, x in zip(names, (q, k, v, a, b, decay), strict=True)}
        for t in range(q.shape[-2] - 1, -1, -1):
            entry, old, read, s = saved[t]
            g["q"][..., t, :] = np.einsum("...de,...e->...d", s, d_output[..., t, :])
            ds = ds + q[..., t, :, None] * d_output[..., t, None, :]
            g["k"][..., t, :] = np.einsum("...de,...e->...d", ds, v[..., t, :])
            g["v"][..., t, :] = np.einsum("...de,...d->...e", ds, k[..., t, :])
            g["replace"][..., t, :] = np.einsum("...de,...e->...d", ds, read)
            dc = np.einsum("...de,...d->...e", ds, b[..., t, :])
            g["remove"][..., t, :] = np.einsum("...de,...e->...d", old if broken == "decay_order" else entry, dc)
            through = a[..., t, :, None] * dc[..., None, :]
            d_old = ds + through if broken == "decay_order" else ds
            g["channel_decay"][..., t, :] = np.sum(d_old * old, axis=-1)
            ds = np.exp(decay[..., t, :, None]) * d_old + (0 if broken == "decay_order" else through)
        if broken == "remove_replace":
            g["remove"], g["replace"] = g["replace"], g["remove"]
        if broken in ("erase_dropped", "d_remove"):
            g["remove"] = 0 * g["remove"]
        if broken == "decay_channel_shared":
            total = g["channel_decay"].sum(-1)
            g["channel_decay"] = 0 * g["channel_decay"]
            g["channel_decay"][..., 0] = total
        if broken == "gate_raw":
            g["channel_decay"] = g["channel_decay"] * decay
        found = {n: x.astype(kinds[n].dtype) for n, x in g.items()}
        return found if state is None else {**found, "state": ds.astype(state.dtype)}

    return run, back


def ssd(broken=""):
    """Mamba-2's scan: f(x, dt, a, b, c, *, skip, dt_bias, dt_softplus, state)."""

    def steps(dt, dt_bias, dt_softplus):
        z = dt + (0 if dt_bias is None else dt_bias[:, None] * (2 if broken == "dt_bias_twice" else 1))
        z = z.astype(dt.dtype)
        if not dt_softplus:
            return np.maximum(z, 0), (z > 0).astype(dt.dtype)
        return np.logaddexp(0, z).astype(dt.dtype), (1 / (1 + np.exp(-z))).astype(dt.dtype)

    def heads(y, h):
        g = y.shape[-3]
        return y[..., np.arange(h) % g if broken == "group_tile" else np.arange(h) // (h // g), :, :]

    def run(x, dt, a, b, c, *, skip=None, dt_bias=None, dt_softplus=False, state=None):
        out_type = x.dtype
        x, dt, a, b, c = wide(x, dt, a, b, c)
        h = x.shape[-3]
        b, c, delta = heads(b, h), heads(c, h), steps(dt, dt_bias, dt_softplus)[0]
        s, rows = start_of(state, b, x), []
        for t in range(x.shape[-2]):
            d = delta[..., t, None, None]
            w = 1 if broken == "dt_not_in_write" else d
            s = np.exp(d * a[:, None, None]) * s + w * b[..., t, :, None] * x[..., t, None, :]
            rows.append(np.einsum("...d,...de->...e", c[..., t, :], s))
        y = np.stack(rows, -2)
        if skip is not None and broken != "skip_dropped":
            y = y + (skip[:, None, None] if skip.ndim == 1 else skip[:, None, :]) * x
        return y.astype(out_type), s

    def back(d_output, x, dt, a, b, c, *, d_state=None, skip=None, dt_bias=None, dt_softplus=False, state=None):
        kinds = {"x": x, "dt": dt, "a": a, "b": b, "c": c}
        x, dt, a, b, c, d_output = wide(x, dt, a, b, c, d_output)
        h, groups = x.shape[-3], b.shape[-3]
        wide_b, wide_c = heads(b, h), heads(c, h)
        delta, slope = steps(dt, dt_bias, dt_softplus)
        s, saved = start_of(state, wide_b, x), []
        for t in range(x.shape[-2]):
            d = delta[..., t, None, None]
            w = 1 if broken == "dt_not_in_write" else d
            kept = np.exp(d * a[:, None, None]) * s
            s = kept + w * wide_b[..., t, :, None] * x[..., t, None, :]
            saved.append((kept, s))
        ds = np.zeros_like(s) if d_state is None else d_state.astype(s.dtype)
        g = {"x": np.zeros_like(x), "dt": np.zeros_like(dt), "b": np.zeros_like(wide_b), "c": np.zeros_like(wide_c)}
        d_a = np.zeros_like(dt)
        for t in range(x.shape[-2] - 1, -1, -1):
            kept, s = saved[t]
            d = delta[..., t, None]
            w = np.ones_like(d) if broken == "dt_not_in_write" else d
            g["c"][..., t, :] = np.einsum("...de,...e->...d", s, d_output[..., t, :])
            ds = ds + wide_c[..., t, :, None] * d_output[..., t, None, :]
            g["b"][..., t, :] = w * np.einsum("...de,...e->...d", ds, x[..., t, :])
            dv = np.einsum("...de,...d->...e", ds, wide_b[..., t, :])
            g["x"][..., t, :] = w * dv
            gamma = np.sum(ds * kept, axis=(-1, -2))
            written = 0 if broken == "dt_not_in_write" else np.sum(dv * x[..., t, :], -1)
            forgotten = 0 if broken == "ddt_one_path" else a * gamma
            g["dt"][..., t] = slope[..., t] * (written + forgotten)
            d_a[..., t] = delta[..., t] * gamma
            ds = np.exp(delta[..., t, None, None] * a[:, None, None]) * ds
        g["a"] = d_a.sum(axis=(0, -1)) if d_a.ndim == 3 else d_a.sum(-1)
        order = np.arange(h) % groups if broken == "group_tile" else np.arange(h) // (h // groups)
        for n in ("b", "c"):
            total = np.zeros_like(kinds[n], dtype=g[n].dtype)
            for i, j in enumerate(order):
                total[..., j, :, :] += g[n][..., i, :, :]
            g[n] = total
        if skip is not None:
            own = d_output * x
            dropped = broken == "skip_dropped"
            wide_skip = skip[:, None, None] if skip.ndim == 1 else skip[:, None, :]
            g["x"] = g["x"] + (0 if dropped else wide_skip * d_output)
            d_skip = own.sum(axis=(0, -2)) if skip.ndim == 2 else own.sum(axis=(0, -2, -1))
            g["skip"] = (0 * d_skip if dropped else d_skip).astype(skip.dtype)
        if dt_bias is not None:
            g["dt_bias"] = g["dt"].sum(axis=(0, -1)) * (2 if broken == "dt_bias_twice" else 1)
        found = {n: y.astype(kinds[n].dtype) if n in kinds else y for n, y in g.items()}
        return found if state is None else {**found, "state": ds.astype(state.dtype)}

    return run, back
