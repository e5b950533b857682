// Which chip's ladder belongs to an architecture, and how many FLOPs a step does with a byte that it fetches.

export const CHIPS_OF = { sm_90a: "h200", sm_100a: "b200", sm_103a: "b200" };

/** FLOPs a byte that the step's tiles fetch from L2 and memory, by the model's count. */
export const intensity = (row) => (2 * row.m * row.n * row.k) / row.fetched_bytes;
