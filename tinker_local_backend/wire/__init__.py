"""What goes between processes: frames of JSON and bytes, and the SDK's messages in them. Nothing that arrives is unpickled."""
