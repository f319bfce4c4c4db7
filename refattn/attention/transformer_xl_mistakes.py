"""The ways people get Transformer-XL attention wrong."""

from refattn.records import Mutation

__all__ = ["transformer_xl_mutations"]

transformer_xl_mutations: tuple[Mutation, ...] = ()
