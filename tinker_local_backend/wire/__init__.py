"""Messages between processes: frames of JSON and bytes, and the SDK's messages in them. Nothing received is unpickled."""
