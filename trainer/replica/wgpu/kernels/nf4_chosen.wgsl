// NF4 (Dettmers et al., arXiv 2305.14314, appendix E) by selecting bit after bit, without memory
// access.
fn nf4(code: vec4<u32>) -> vec4<f32> {
  let bit0 = (code & vec4<u32>(1u)) != vec4<u32>(0u);
  let bit1 = (code & vec4<u32>(2u)) != vec4<u32>(0u);
  let bit2 = (code & vec4<u32>(4u)) != vec4<u32>(0u);
  let bit3 = (code & vec4<u32>(8u)) != vec4<u32>(0u);
  let v0 = select(vec4<f32>(-1.0), vec4<f32>(-0.6961928009986877), bit0);
  let v2 = select(vec4<f32>(-0.5250730514526367), vec4<f32>(-0.39491748809814453), bit0);
  let v4 = select(vec4<f32>(-0.28444138169288635), vec4<f32>(-0.18477343022823334), bit0);
  let v6 = select(vec4<f32>(-0.09105003625154495), vec4<f32>(0.0), bit0);
  let v8 = select(vec4<f32>(0.07958029955625534), vec4<f32>(0.16093020141124725), bit0);
  let v10 = select(vec4<f32>(0.24611230194568634), vec4<f32>(0.33791524171829224), bit0);
  let v12 = select(vec4<f32>(0.44070982933044434), vec4<f32>(0.5626170039176941), bit0);
  let v14 = select(vec4<f32>(0.7229568362236023), vec4<f32>(1.0), bit0);
  let low = select(select(v0, v2, bit1), select(v4, v6, bit1), bit2);
  let high = select(select(v8, v10, bit1), select(v12, v14, bit1), bit2);
  return select(low, high, bit3);
}
