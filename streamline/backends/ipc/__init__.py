"""What crosses between a stream and its hosts: messages, links, codecs, shared memory."""
