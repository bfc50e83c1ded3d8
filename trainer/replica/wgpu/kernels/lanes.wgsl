// The lanes of a subgroup, or 0 if a thread's number differs from that in the workgroup.
@group(0) @binding(0) var<storage, read_write> sizes: array<u32>;

@compute @workgroup_size(8)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_size) size: u32,
        @builtin(subgroup_invocation_id) peer: u32) {
  sizes[lane] = select(0u, size, peer == lane);
}
