"""What decides in OpenGyre, as pure functions: which cell serves and which trains (`policy`), how many groups are
admitted (`admission`), and the books of what was (`ledger`, `progress`). The allocator feeds it from the bus, the
simulator from a virtual clock."""
