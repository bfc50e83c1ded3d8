"""A student's tokenizer, cut from its teacher's."""
