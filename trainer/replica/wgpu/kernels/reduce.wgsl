// Sums and maxima over a workgroup of 64, in a fixed order.
var<workgroup> partial: array<f32, 64>;

fn sum_over_group(value: f32, lane: u32) -> f32 {
  partial[lane] = value;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (lane < half) { partial[lane] += partial[lane + half]; }
    workgroupBarrier();
  }
  let total = partial[0];
  workgroupBarrier();
  return total;
}

// NaN unless the row's sum of exp(value - largest) is finite. It is not only if a value was not: a
// driver's `max` may drop a NaN, its `exp` make an Inf of it, and its `log` a number (SwiftShader).
fn nan_unless_finite(value: f32, sum: f32) -> f32 {
  let bits = bitcast<u32>(sum);
  return select(value, bitcast<f32>(bits | 0x7fc00000u), (bits & 0x7f800000u) == 0x7f800000u);
}

fn max_over_group(value: f32, lane: u32) -> f32 {
  partial[lane] = value;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (lane < half) { partial[lane] = max(partial[lane], partial[lane + half]); }
    workgroupBarrier();
  }
  let largest = partial[0];
  workgroupBarrier();
  return largest;
}
