"""The ways people get the attention of the Compressive Transformer wrong."""

from refattn.records import Mutation

__all__ = ["compressive_mutations"]

compressive_mutations: tuple[Mutation, ...] = ()
