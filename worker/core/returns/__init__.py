"""Who will come back: classes of conversations, their ages, what each is worth, and how that is learned."""
