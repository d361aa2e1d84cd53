//! The plain backend's layer, in float32 and without any care for speed.

use super::*;
use half::{bf16, f16};
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv};
use headway_tensor::{TensorMut, TensorRef, View};
use headway_testkit::reference::round::{f8_value, round_to};
use std::{collections::HashMap, ops::Range, sync::LazyLock};

/// One layer's numbers.
pub struct PlainLayer<const FAULT: u8> {
    heads: [usize; 2],
    sizes: [usize; 2],
    scale: f64,
    window: Option<usize>,
    cap: Option<f64>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    scales: [f32; 2],
}

impl<const FAULT: u8> LayerImpl for PlainLayer<FAULT> {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
}

fn read(t: TensorRef<'_>) -> Result<Vec<f32>> {
    Ok(match t.dtype() {
        DType::F16 => t.into_host::<f16>()?.iter().map(|x| x.to_f32()).collect(),
        DType::BF16 => t.into_host::<bf16>()?.iter().map(|x| x.to_f32()).collect(),
        _ => t.into_host::<f32>()?.to_vec(),
    })
}

fn encode(dtype: DType, x: f32) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        d => {
            let x = round_to(d, x);
            let codes = &CODES[usize::from(d == DType::F8E5M2)];
            vec![codes.get(&x.to_bits()).copied().unwrap_or(0x7f)]
        }
    }
}

/// The code of every finite value of e4m3 and of e5m2.
static CODES: LazyLock<[HashMap<u32, u8>; 2]> = LazyLock::new(|| {
    [4, 5].map(|bits| {
        let finite = (0..=255).map(|c| (f8_value(c, bits), c)).filter(|(x, _)| x.is_finite());
        finite.map(|(x, c)| (x.to_bits(), c)).collect()
    })
});

fn decode(dtype: DType, b: &[u8]) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::F8E4M3 => f8_value(b[0], 4),
        _ => f8_value(b[0], 5),
    }
}

impl<const FAULT: u8> PlainLayer<FAULT> {
    /// First byte of a slot's head: key elements, then value elements.
    fn at(&self, kv: &KvMut<'_>, block: usize, token: usize, head: usize) -> usize {
        let stride = if FAULT == ASSUMES_PAGES_SIDE_BY_SIDE { kv.page_bytes } else { kv.block_stride };
        let within = match kv.layout {
            KvCacheLayout::LBHNC => head * kv.block_size + token,
            _ => token * self.heads[1] + head,
        };
        kv.offset + block * stride + within * (self.sizes[0] + self.sizes[1]) * kv.dtype.size()
    }

    fn score(&self, q: &[f32], k: &[f32], head: usize, distance: i64) -> f64 {
        let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let mut s = dot * self.scale;
        if let Some(cap) = self.cap {
            s = if FAULT == CAP_OVERFLOWS {
                let (up, down) = ((s / cap) as f32, (-s / cap) as f32);
                cap * f64::from((up.exp() - down.exp()) / (up.exp() + down.exp()))
            } else {
                cap * (s / cap).tanh()
            };
        }
        s + self.slopes.as_ref().map_or(0.0, |a| f64::from(a[head]) * distance as f64)
    }

    /// Whether row i of a request sees key j.
    fn sees(&self, m: &Metadata, request: usize, (i, j): (i64, i64), causal: bool) -> bool {
        let window = self.window.or(m.rswa_window);
        let window = window.map(|w| if FAULT == WINDOW_ONE_TOO_LONG { w + 1 } else { w });
        let prefixes = m.common.inputs.rswa_prefix_lens.as_ref().and_then(|p| p.host());
        let prefix = prefixes.map_or(0, |p| i64::from(p[request]));
        let in_prefix = j < prefix && FAULT != FORGETS_THE_PROMPT;
        let spans = m.common.inputs.mm_prefix_ranges.as_ref().map_or(&[][..], |s| &s[request]);
        let both = |s: &Range<usize>| [i, j].iter().all(|x| (s.start as i64..s.end as i64).contains(x));
        (!causal || j <= i) && (in_prefix || window.is_none_or(|w| j > i - w as i64))
            || (FAULT != IGNORES_RANGES && spans.iter().any(both))
    }
}

impl<const FAULT: u8> AttentionImpl for PlainLayer<FAULT> {
    const FORWARD_WRITES_KV_CACHE: bool = FAULT == WRITES_SHARED;

    fn new(a: &AttentionArgs<'_>, (): &()) -> Result<Self> {
        Ok(Self {
            heads: [a.num_heads, a.num_kv_heads],
            sizes: [a.head_size, a.head_size_v],
            scale: f64::from(a.scale),
            window: a.sliding_window,
            cap: a.logit_soft_cap.map(f64::from),
            slopes: a.alibi_slopes.map(<[f32]>::to_vec),
            sinks: a.sinks.and_then(|s| s.host()).map(<[f32]>::to_vec),
            scales: [a.k_scale, a.v_scale],
        })
    }

    fn update_kv_cache(&self, _: &Host, x: &Qkv<'_>, kv: &mut KvMut<'_>, slots: &View<i64>) -> Result<()> {
        let (strides, k, v) = ([x.k.strides(), x.v.strides()], read(x.k)?, read(x.v)?);
        let size = kv.dtype.size();
        for (t, &slot) in slots.host().unwrap_or(&[]).iter().enumerate() {
            let slot = if FAULT == WRITES_SKIPPED_SLOTS { slot.max(0) } else { slot };
            let Ok(slot) = usize::try_from(slot) else { continue };
            for head in 0..self.heads[1] {
                let mut at = self.at(kv, slot / kv.block_size, slot % kv.block_size, head);
                for (which, x) in [&k, &v].into_iter().enumerate() {
                    let from = t * strides[which][0] + head * strides[which][1];
                    for i in 0..self.sizes[which] {
                        let x = x[from + i] / if size == 1 { self.scales[which] } else { 1.0 };
                        let x = if FAULT == CACHE_OVERFLOWS && x > 464.0 { f32::NAN } else { x };
                        let bytes = encode(kv.dtype, x);
                        kv.host_bytes()?[at..at + size].copy_from_slice(&bytes);
                        at += size;
                    }
                }
            }
        }
        Ok(())
    }

    fn forward(
        &self,
        cx: &Host,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        m: &Metadata,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        if FAULT == WRITES_SHARED {
            self.update_kv_cache(cx, x, kv, &m.common.slot_mapping)?;
        }
        if FAULT == PANICS && self.window.is_some() {
            panic!("index out of bounds");
        }
        let starts = m.common.inputs.query_start_loc.host();
        if FAULT != LEAVES_PADDING {
            out.zero_host()?;
        }
        let (q, stride) = (read(x.q)?, x.q.strides().to_vec());
        let (out_stride, dtype) = (out.strides().to_vec(), out.dtype());
        let mut result = vec![];
        for r in 0..m.common.inputs.num_reqs {
            self.request(m, kv, r, &q, &stride, &mut result)?;
        }
        let per_row = self.heads[0] * self.sizes[1];
        let live = starts.last().map_or(0, |&n| n as usize);
        write(out, dtype, |t, i| {
            let (head, e) = (i / self.sizes[1], i % self.sizes[1]);
            (t < live).then(|| (t * out_stride[0] + head * out_stride[1] + e, result[t * per_row + i]))
        })
    }
}

/// Writes the elements that `f(row, element)` gives.
fn write(out: TensorMut<'_>, dtype: DType, f: impl Fn(usize, usize) -> Option<(usize, f64)>) -> Result<()> {
    let (rows, per_row) = (out.shape()[0], out.shape()[1] * out.shape()[2]);
    let all: Vec<_> =
        (0..rows).flat_map(|t| (0..per_row).map(move |i| (t, i))).filter_map(|(t, i)| f(t, i)).collect();
    match dtype {
        DType::F16 => {
            let o = out.into_host::<f16>()?;
            all.iter().for_each(|&(at, x)| o[at] = f16::from_f64(x));
        }
        DType::BF16 => {
            let o = out.into_host::<bf16>()?;
            all.iter().for_each(|&(at, x)| o[at] = bf16::from_f64(x));
        }
        _ => {
            let o = out.into_host::<f32>()?;
            all.iter().for_each(|&(at, x)| o[at] = x as f32);
        }
    }
    Ok(())
}

impl<const FAULT: u8> PlainLayer<FAULT> {
    fn keys(
        &self,
        m: &Metadata,
        kv: &mut KvMut<'_>,
        r: usize,
        head: usize,
    ) -> Result<Vec<(i64, [Vec<f32>; 2])>> {
        let len = m.common.inputs.seq_lens.host().map_or(0, |s| s[r]) as usize;
        let block = if FAULT == WRONG_BLOCK_SIZE { m.manager_block_size } else { kv.block_size };
        let reach = if FAULT == READS_THE_TAIL { len.next_multiple_of(block) } else { len };
        let mut keys = vec![];
        for j in 0..reach {
            let id = *m
                .common
                .blocks_of(r)
                .get(j / block)
                .ok_or_else(|| AttentionError::Inputs("table".into()))?;
            let at = self.at(kv, id as usize, j % block, head);
            let (dtype, size) = (kv.dtype, kv.dtype.size());
            let bytes = kv.host_bytes()?;
            let part = |which: usize, from: usize| -> Vec<f32> {
                let scale = if size == 1 { self.scales[which] } else { 1.0 };
                (0..self.sizes[which]).map(|i| decode(dtype, &bytes[from + i * size..]) * scale).collect()
            };
            keys.push((j as i64, [part(0, at), part(1, at + self.sizes[0] * size)]));
        }
        Ok(keys)
    }

    fn request(
        &self,
        m: &Metadata,
        kv: &mut KvMut<'_>,
        r: usize,
        q: &[f32],
        stride: &[usize],
        result: &mut Vec<f64>,
    ) -> Result<()> {
        let inputs = &m.common.inputs;
        let starts = inputs.query_start_loc.host();
        let (from, rows) = (starts[r] as usize, inputs.query_len(r));
        let len = inputs.seq_lens.host().map_or(0, |s| s[r]) as i64;
        let keys: Vec<_> = (0..self.heads[1]).map(|h| self.keys(m, kv, r, h)).collect::<Result<_>>()?;
        let causal = inputs.causal.of(if FAULT == ONE_CAUSAL_FLAG { 0 } else { r });
        for row in 0..rows {
            let first = if FAULT == MASK_FROM_THE_TOP { 0 } else { len - rows as i64 };
            let i = first + row as i64;
            for head in 0..self.heads[0] {
                let kv_head = match FAULT {
                    HEADS_IN_TURNS => head % self.heads[1],
                    _ => head / (self.heads[0] / self.heads[1]),
                };
                let at = (from + row) * stride[0] + head * stride[1];
                let keys = &keys[kv_head];
                let seen: Vec<_> =
                    keys.iter().filter(|(j, _)| self.sees(m, r, (i, *j), causal) || *j >= len).collect();
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|(j, [k, _])| match *j >= len {
                        true => f64::NEG_INFINITY,
                        false => self.score(&q[at..at + self.sizes[0]], k, head, j - i),
                    })
                    .collect();
                result.extend(self.mix(&scores, &seen, head, m));
            }
        }
        Ok(())
    }

    fn mix(&self, scores: &[f64], seen: &[&(i64, [Vec<f32>; 2])], head: usize, m: &Metadata) -> Vec<f64> {
        let sink = self.sinks.as_ref().map(|s| f64::from(s[head]));
        let sink = if FAULT == SCALES_SINKS { sink.map(|s| s * self.scale) } else { sink };
        let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - top).exp()).sum();
        let mut out = vec![0.0; self.sizes[1]];
        for (s, (_, [_, v])) in scores.iter().zip(seen) {
            out.iter_mut().zip(v).for_each(|(o, v)| *o += (s - top).exp() / sum * f64::from(*v));
        }
        let wobble = match FAULT {
            DEPENDS_ON_THE_BATCH if m.batch_invariant => {
                1.0 + 4e-8 * m.common.inputs.num_actual_tokens as f64
            }
            BUILDER_REMEMBERS => 1.0 + 2e-7 * m.longest as f64,
            _ => 1.0,
        };
        out.iter().map(|o| o * wobble).collect()
    }
}
