// dtable[unique[u]] += the rows of dy that order[starts[u]] to order[starts[u + 1] - 1] name, added
// in that order; a lane owns a column of a token. The table is a window from row `first` on.
struct Params { tokens: u32, width: u32, first: u32, rows: u32 }
@group(0) @binding(0) var<storage, read> dy: array<f32>;
@group(0) @binding(1) var<storage, read> unique: array<u32>;
@group(0) @binding(2) var<storage, read> starts: array<u32>;
@group(0) @binding(3) var<storage, read> order: array<u32>;
@group(0) @binding(4) var<storage, read_write> dtable: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let blocks = (p.width + 63u) / 64u;
  let index = group_index(group, groups);
  let u = index / blocks;
  let column = index % blocks * 64u + lane;
  if (u >= p.tokens || column >= p.width) { return; }
  let first = starts[u];
  let stop = starts[u + 1u];
  let row = unique[u] - p.first;  // a token before the window wraps around
  if (first >= stop || row >= p.rows) { return; }
  var sum = 0.0;
  for (var i = first; i < stop; i++) { sum += dy[order[i] * p.width + column]; }
  dtable[row * p.width + column] += sum;
}
