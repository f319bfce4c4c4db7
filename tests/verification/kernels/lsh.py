"""An independent kernel of LSH attention for the verifier's tests, and what breaks it.

Nothing here comes from refattn.  It works as most code does: sort, cut, look one chunk back, a softmax per round, the rounds
weighted by their log-sum-exp; a pair that meets in N rounds has ln N taken off its logit.
"""

import numpy as np


def lsh(*, no_counts=False, no_look_back=False, plain_keys=False, constant_weights=False, no_key_role=False):
    """Forward and backward; each flag breaks one step."""

    def rounds(qk, rotations, hashes, n_buckets, chunk, causal, within_bucket):
        """Of every round: positions of the chunks (b,h,n,w) and windows (b,h,n,2w), and the visible pairs."""
        n_buckets = 2 * rotations.shape[-1] if n_buckets is None else n_buckets
        if isinstance(n_buckets, (tuple, list)):
            raise NotImplementedError("factored hashes")
        *lead, t, d = qk.shape
        if rotations.ndim != 3 or rotations.shape != (d, hashes, n_buckets // 2):
            raise NotImplementedError("rotations per head")
        n = -(-t // chunk)
        found, met = [], np.zeros((*lead, t, t), int)
        for s in range(hashes):
            projected = qk @ rotations[:, s].astype(qk.dtype)
            bucket = np.concatenate([projected, -projected], -1).argmax(-1)
            order = np.argsort(bucket.astype(np.int64) * t + np.arange(t), -1)
            place = np.argsort(order, -1) // chunk
            padded = np.concatenate([order, np.full((*lead, n * chunk - t), -1)], -1).reshape(*lead, n, chunk)
            back = np.concatenate([np.full_like(padded[..., :1, :], -1), padded[..., :-1, :]], -2)
            if no_look_back:
                back = np.full_like(back, -1)
            window = np.concatenate([back, padded], -1)
            i, j = padded[..., :, None], window[..., None, :]
            seen = (i >= 0) & (j >= 0) & (i != j)
            ahead = place[..., :, None] - place[..., None, :]
            together = (ahead >= 0) & (ahead < 2 - no_look_back)
            if causal:
                seen &= j <= i
            if within_bucket:
                flat = np.concatenate([bucket, np.full((*lead, 1), -1)], -1)
                numbers = [np.take_along_axis(flat[..., None, :], x, -1) for x in (padded, window)]
                seen &= numbers[0][..., :, None] == numbers[1][..., None, :]
                together &= bucket[..., :, None] == bucket[..., None, :]
            met += together
            found.append((padded, window, seen))
        return found, met

    def rows(x, at):
        """x (b,h,t,d) at positions (b,h,n,w); empty slots take position 0."""
        at = np.maximum(at, 0)
        return np.take_along_axis(x[..., None, :, :], at[..., None], -2)

    def add(total, at, part):
        """Rows of part (b,h,n,w,d) added to total (b,h,t,d), one position after the other."""
        for place in np.ndindex(at.shape):
            if at[place] >= 0:
                total[(*place[:2], at[place])] += part[place]

    def attend(qk, v, rotations, hashes, n_buckets, chunk, causal, within_bucket):
        norm = np.sqrt((qk * qk).sum(-1, keepdims=True))
        k = qk if plain_keys else qk / norm
        scale = qk.dtype.type(qk.shape[-1] ** -0.5)
        hashes = rotations.shape[-2] if hashes is None else hashes
        found, met = rounds(qk, rotations, hashes, n_buckets, chunk, causal, within_bucket)
        *lead, t, _ = qk.shape
        kept, outputs, lses = [], np.zeros((hashes, *v.shape), v.dtype), np.full((hashes, *lead, t), -np.inf, v.dtype)
        for s, (own, window, seen) in enumerate(found):
            logits = scale * rows(qk, own) @ np.swapaxes(rows(k, window), -1, -2)
            if not no_counts:
                index = np.maximum(own, 0)[..., :, None] * t + np.maximum(window, 0)[..., None, :]
                flat = met.reshape(*lead, 1, 1, t * t)
                logits = logits - np.log(np.maximum(np.take_along_axis(flat, index, -1), 1)).astype(v.dtype)
            logits = np.where(seen, logits, -np.inf)
            top = logits.max(-1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0)
            share = np.exp(logits - top)
            total = share.sum(-1, keepdims=True)
            with np.errstate(divide="ignore"):
                z = (np.log(total) + top)[..., 0]
            part = share / np.where(total > 0, total, 1)
            output = part @ rows(v, window)
            for place in np.ndindex(own.shape):
                if own[place] >= 0:
                    outputs[(s, *place[:2], own[place])] = output[place]
                    lses[(s, *place[:2], own[place])] = z[place]
            kept.append((own, window, part, z))
        top = lses.max(0)
        shift = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(lses - shift).sum(0)) + shift
        alone = np.isneginf(lse)
        weights = np.exp(lses - np.where(alone, 0, lse))
        output = (weights[..., None] * outputs).sum(0)
        output = np.where(alone[..., None], v, output)
        lse = np.where(alone, scale * (qk * k).sum(-1), lse)
        return output, lse, alone, kept, outputs, weights, k, norm, scale

    def forward(qk, v, *, rotations, hashes=None, n_buckets=None, chunk=64, causal=False, within_bucket=True):
        with np.errstate(invalid="ignore"):
            output, lse, *_ = attend(qk, v, rotations, hashes, n_buckets, chunk, causal, within_bucket)
        return output, lse

    def backward(
        d_output,
        qk,
        v,
        *,
        rotations,
        hashes=None,
        n_buckets=None,
        chunk=64,
        causal=False,
        within_bucket=True,
        d_lse=None,
    ):
        with np.errstate(invalid="ignore"):
            output, lse, alone, kept, outputs, weights, k, norm, scale = attend(
                qk, v, rotations, hashes, n_buckets, chunk, causal, within_bucket
            )
        d_lse = np.zeros_like(lse) if d_lse is None else d_lse
        d_q, d_k, d_v = np.zeros_like(qk), np.zeros_like(qk), np.zeros_like(v)
        for s, (own, window, part, _) in enumerate(kept):
            at = np.maximum(own, 0)
            w = np.take_along_axis(weights[s][..., None, :], at, -1) * (own >= 0)
            d_o, base = rows(d_output, own), rows(outputs[s] if constant_weights else output, own)
            p = w[..., None] * part
            through = d_o @ np.swapaxes(rows(v, window), -1, -2) - (d_o * base).sum(-1, keepdims=True)
            d_logits = p * (through + np.take_along_axis(d_lse[..., None, :], at, -1)[..., None])
            add(d_v, window, np.swapaxes(p, -1, -2) @ d_o)
            add(d_q, own, scale * d_logits @ rows(k, window))
            add(d_k, window, scale * np.swapaxes(d_logits, -1, -2) @ rows(qk, own))
        lone = np.where(alone, d_lse, 0)[..., None]
        d_v += np.where(alone[..., None], d_output, 0)
        d_q += scale * lone * k
        d_k += scale * lone * qk
        if no_key_role:
            d_k = np.zeros_like(d_k)
        d_k = d_k if plain_keys else (d_k - k * (k * d_k).sum(-1, keepdims=True)) / norm
        return {"qk": d_q + d_k, "v": d_v}

    return forward, backward
