"""A cache for machines: an object comes from its store once, and from machines of the same job after.

All machines of a job have the same list of peers. For each object they rank them alike (`peer`). A process that misses
an object on its own disk asks the first of the ranking for the range that it wants, its own machine's server if that is
the first (`client`). One process of each machine serves (`node`): what is in the machine's folder, and what isn't it
fetches from the store for all who want it, in runs that readers share, and keeps (`server`). So a range is fetched once
however many machines ask at the same moment, and nothing is fetched that nobody asked for.

Success: bytes of the version that was asked for, as many as were asked for; the reader writes them into its own folder,
as it does with those of a store. A peer that refuses the connection: the next of the ranking. One that is cut, silent
for `STALL_S`, or answers anything else: the store, from the same byte on, and it isn't asked for a while, which doubles
each time (`PAUSE_S`). One that hasn't got the bytes (404: its disk is full, the store failed, the object was replaced):
the store, whose error is then the reader's. Nothing waits for a peer longer than that. Cancellation: the connection is
closed; a run that no reader waits for any more ends. Death of the serving process: another one of its machine takes
over.

Both ends of a connection prove that they know the key (`core.handshake`) before either says or believes anything else.
After that it is plain HTTP, over TLS if that is asked for; else the network must be trusted. The fetching machine uses
its own credentials; a URL that has one in it is told to nobody, and read from its server.

Rejected: a machine that fetches when its own consumer reads, while the others wait for it: they would go at the pace of
the slowest loop. An owner that fetches whole objects: of a Parquet file some columns may be wanted. A tracker that says
who has what: one more thing that dies, where a ranking needs no talk.
"""
