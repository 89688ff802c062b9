"""Every flag of Megatron's parser: obeyed, set, without meaning here, or untested. What stands in no list is refused."""
