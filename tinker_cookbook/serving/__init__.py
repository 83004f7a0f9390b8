"""The renderers behind a server's chat: which one a model's chats have, and how OpenAI's messages go through it.

`tinker_local_backend.server` says what it wants of a chat format (`chat_format.ChatFormat`) and knows nothing of this package;
its `__main__` hands it `formats.ServedFormats`.
"""
