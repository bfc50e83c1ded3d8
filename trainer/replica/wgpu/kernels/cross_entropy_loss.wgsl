// total += sum over rows of (sum_k p_k) (largest + log(sum)) - score; one workgroup for all rows.
// The two large terms are subtracted first, for the precision of the small one.
struct Params { rows: u32, targets: u32 }
@group(0) @binding(0) var<storage, read> state: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> probabilities: array<f32>;
@group(0) @binding(2) var<storage, read_write> total: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
  var loss = 0.0;
  for (var row = lane; row < p.rows; row += 64u) {
    var mass = 0.0;
    for (var k = row * p.targets; k < (row + 1u) * p.targets; k++) { mass += probabilities[k]; }
    // A row that does not count adds nothing, not even the NaN of logits that were not computed.
    if (mass != 0.0) { loss += mass * state[row].x - state[row].z + mass * log(state[row].y); }
  }
  loss = sum_over_group(loss, lane);
  if (lane == 0u) { total[0] += loss; }
}
