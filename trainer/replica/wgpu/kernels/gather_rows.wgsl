// out[n] = table[index[n]], one workgroup a row. The table may be a window that begins at row
// `first`: rows outside it do not change. SKIPPED gives zeros.
struct Params { count: u32, width: u32, first: u32, rows: u32 }
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read> index: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;
override BF16: bool;
const SKIPPED = 0xffffffffu;

//!use grid

fn element(i: u32) -> f32 {
  if (!BF16) { return bitcast<f32>(table[i]); }
  return bitcast<f32>((table[i / 2u] >> (i % 2u * 16u)) << 16u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let n = group_index(group, groups);
  if (n >= p.count) { return; }
  let row = index[n] - p.first;  // a row before the window wraps around
  if (index[n] == SKIPPED) {
    for (var i = lane; i < p.width; i += 64u) { out[n * p.width + i] = 0.0; }
  } else if (row < p.rows) {
    for (var i = lane; i < p.width; i += 64u) {
      out[n * p.width + i] = element(row * p.width + i);
    }
  }
}
