"""Run the real engines without a GPU or peers: fake tensors, a fake world, patches of other libraries."""
