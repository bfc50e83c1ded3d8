// Workgroups of a grid of graph.spread(), numbered from 0; the last ones may be surplus.
fn group_index(group: vec3<u32>, groups: vec3<u32>) -> u32 {
  return group.y * groups.x + group.x;
}
