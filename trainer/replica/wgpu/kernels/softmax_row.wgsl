// Row of `scores` = softmax(p.scale * row) over its first `visible` keys, 0 after them; in place.
fn softmax_row(row: u32, visible: u32, lane: u32) {
  let base = row * p.width;
  var largest = -3.4e38;
  for (var i = lane; i < visible; i += 64u) { largest = max(largest, p.scale * scores[base + i]); }
  largest = max_over_group(largest, lane);
  var sum = 0.0;
  for (var i = lane; i < visible; i += 64u) {
    let value = exp(p.scale * scores[base + i] - largest);
    scores[base + i] = value;
    sum += value;
  }
  sum = sum_over_group(sum, lane);
  sum = nan_unless_finite(sum, sum);
  for (var i = lane; i < visible; i += 64u) { scores[base + i] /= sum; }
  for (var i = visible + lane; i < p.width; i += 64u) { scores[base + i] = 0.0; }
}
