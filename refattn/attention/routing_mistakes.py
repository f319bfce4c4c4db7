from refattn.records import Mutation

routing_mutations: tuple[Mutation, ...] = ()
