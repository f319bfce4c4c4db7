"""Softmax attention over a problem, block by block: options, problem, blocks, terms, forward, backward."""
