"""The ways people get LSH attention wrong, each as the numbers that the mistake gives."""

from refattn.records import Mutation

__all__ = ["lsh_mutations"]

lsh_mutations: tuple[Mutation, ...] = ()
