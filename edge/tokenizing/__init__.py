"""From a caller's messages to token ids and from token ids back to text, exactly as the model's own tokenizer does.

Token ids of prompts are packed little-endian uint32, 4 bytes a token. A *segment* is a stretch of a rendered prompt
that begins at an added token (or at the start of the text); tokenizing segment by segment gives what tokenizing the
whole gives, so a segment seen before under the same scope costs a look-up.
"""
