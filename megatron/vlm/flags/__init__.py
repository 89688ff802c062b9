"""Every flag of Megatron's parser is obeyed, set, without meaning here, or untested; what is in no list is refused."""
