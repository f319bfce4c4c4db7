"""Print figures that papers and surveys give for whole layers beside what refattn counts.

usage: python docs/figures.py
"""

from collections.abc import Iterator

from refattn.cost import activations, transformer

MIB, GIB = 2**20, 2**30
SMALL = {"layers": 12, "m": 512, "h": 8, "f": 2048, "q": 1}  # the small model of adaptive spans, one predicted token
LARGE = {"layers": 24, "m": 768, "h": 8, "f": 4096, "q": 1}


def bert_memory() -> Iterator[tuple[str, str, str]]:
    """BERT base: 12 layers, 12 heads, 768 channels, float32."""
    one = activations(m=768, h=12, q=512)
    yield "keys, 512 tokens, one layer", "1.5 MB", f"{one['k'] / MIB:.1f} MiB"
    yield "keys and values", "(the source counts keys)", f"{(one['k'] + one['v']) / MIB:.1f} MiB"
    yield "attention weights, 512 tokens, one layer", "12 MB", f"{one['weights'] / MIB:.0f} MiB"
    for tokens, said in ((512, "150 MB"), (1024, "600 MB"), (2048, "2.4 GB")):
        found = activations(layers=12, m=768, h=12, q=tokens)["weights"]
        yield f"attention weights, {tokens} tokens, 12 layers", said, f"{found / 1e6:.0f} MB"
    score = activations(m=1, h=1, q=65536)["weights"]
    yield "one matrix of scores, 64K tokens", "16 GB", f"{score / GIB:.0f} GiB"


def talking_heads() -> Iterator[tuple[str, str, str]]:
    """One layer, m = 768 channels, n = 512 tokens: n x n products of 2 n n m multiply-adds in a layer of four times that."""
    for heads in (6, 12, 24, 48):
        plain = transformer(m=768, h=heads, q=512).multiplies
        extra = transformer(m=768, h=heads, x=heads, y=heads, q=512).multiplies - plain
        share, products = heads / (768 // heads), 2 * 512 * 512 * 768
        yield f"multiply-adds of a layer with {heads} heads", "4 n m m + 2 n n m = 1,610,612,736", f"{plain:,}"
        yield "  talking heads add, of the n x n products", f"h/d = {share:.2%}", f"{extra / products:.2%} = {extra:,}"
        yield "  and of the layer", f"h/(4 d) = {share / 4:.2%}", f"{extra / plain:.2%}"


def adaptive_span() -> Iterator[tuple[str, str, str]]:
    """Multiply-adds for one predicted token; each token meets ``span`` cached keys."""
    small = transformer(**SMALL, span=314).multiplies
    yield "small model at an average span of 314", "42M (text8), 41M (enwik8)", f"{small / 1e6:.1f}M"
    share = 1 - transformer(**{**SMALL, "f": 0}, span=256).multiplies / transformer(**SMALL, span=256).multiplies
    yield "share of the feed-forward at span 256", "62%", f"{share:.1%}"
    share = transformer(**{**SMALL, "f": 0}, span=8192).multiplies / transformer(**SMALL, span=8192).multiplies
    yield "share of the attention layer at span 8192", "82%", f"{share:.1%}"
    large = transformer(**LARGE, span=245)
    yield "large model at span 245: does not reproduce", "179M", f"{large.multiplies / 1e6:.1f}M"
    yield "parameters of the small model", "38M", f"{transformer(**SMALL).parameters / 1e6:.1f}M"
    yield "parameters of the large model", "209M", f"{large.parameters / 1e6:.1f}M"


SECTIONS = {
    "Memory of BERT base (May 2020, A Survey of Long-Term Context in Transformers)": bert_memory,
    "Talking-Heads attention (Shazeer et al. 2020)": talking_heads,
    "Adaptive attention span (Sukhbaatar et al. 2019)": adaptive_span,
}


def main() -> None:
    for title, rows in SECTIONS.items():
        table = [("", "source says", "counted"), *rows()]
        first, second = (max(len(row[n]) for row in table) for n in (0, 1))
        print(title)
        for what, said, counted in table:
            print(f"  {what:{first}}  {said:>{second}}  {counted}")
        print()


if __name__ == "__main__":
    main()
