"""The samples of a pack as one sequence for any model: where its tokens stand, what they see, and what is refused."""
