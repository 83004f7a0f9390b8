"""Renderers for a server's chat endpoints: which one a model uses, and how it renders OpenAI's messages.

`tinker_local_backend.server` defines the interface (`chat_format.ChatFormat`) and does not import this package; its
`__main__` passes it `formats.ServedFormats`.
"""
