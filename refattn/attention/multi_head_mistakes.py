multi_head_mutations = ()
