talking_heads_mutations = ()
