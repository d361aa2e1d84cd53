//! The cases of `bench attention`, read from a file; its `semantics` say what each number means.
//! headway's own are embedded: `cases.json` for every device, `cases-cuda.json` for CUDA devices too.

use super::super::{
    CliError,
    measure::{Case, Layer},
};
use headway_attention::{
    KindTag, KvCacheSpec, LayerNeed,
    group::kv::spec::AttentionSpec,
    process::rules::{KvCacheDType, LatentDims},
};
use headway_tensor::DType;
use serde::Deserialize;
use std::path::Path;

const EMBEDDED: &str = include_str!("cases.json");
const EMBEDDED_CUDA: &str = include_str!("cases-cuda.json");

/// A file of cases.
#[derive(Deserialize, Debug)]
pub struct CaseFile {
    /// Its form: [`SCHEMA`].
    schema: String,
    /// What holds of every case.
    pub semantics: Semantics,
    /// Activation and cache dtypes to run.
    pub dtypes: Vec<String>,
    /// Thread counts to run.
    pub threads: Vec<usize>,
    /// Head shapes to run.
    pub heads: Vec<Heads>,
    /// The cases.
    pub cases: Vec<Case>,
}

const SCHEMA: &str = "headway-cpu-attn-cases/1";

/// What the bench reads of a file's semantics; the rest is text for people.
#[derive(Deserialize, Debug)]
pub struct Semantics {
    /// Bytes of the cache that cold cases rotate through.
    pub pool_bytes: usize,
}

/// Heads of a layer.
#[derive(Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// `32/8/128`.
    pub id: String,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a head; of latent attention of a row of the cache.
    pub head_size: usize,
    /// Dimensions of latent attention, where the heads are of that: `num_kv_heads` is 1 then.
    #[serde(default)]
    pub latent: Option<Latent>,
}

/// Dimensions of latent attention, in elements.
#[derive(Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Of a query/key head without rotary position.
    pub nope: usize,
    /// Of one with.
    pub rope: usize,
    /// Of the latent.
    pub rank: usize,
    /// Of a value head.
    pub v: usize,
}

impl From<Latent> for LatentDims {
    fn from(l: Latent) -> Self {
        Self {
            qk_nope_head_dim: l.nope,
            qk_rope_head_dim: l.rope,
            kv_lora_rank: l.rank,
            v_head_dim: l.v,
            index_topk: None,
        }
    }
}

impl CaseFile {
    /// Reads a file, or what is embedded for a device: on CUDA that file's cases, and those of the CPU's that it does
    /// not have.
    ///
    /// # Errors
    /// A file that can't be read or says something else; both name it.
    pub fn read(path: Option<&Path>, platform: &str) -> Result<Self, CliError> {
        let Some(path) = path else {
            let common = Self::parse("cases.json".as_ref(), EMBEDDED)?;
            if platform != "cuda" {
                return Ok(common);
            }
            let mut own = Self::parse("cases-cuda.json".as_ref(), EMBEDDED_CUDA)?;
            let is_new = |case: &Case| own.cases.iter().all(|c| c.id != case.id);
            let more: Vec<_> = common.cases.into_iter().filter(is_new).collect();
            own.cases.extend(more);
            return Ok(own);
        };
        let text = std::fs::read_to_string(path)
            .map_err(|e| CliError::File { path: path.to_owned(), why: e.to_string() })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, CliError> {
        let wrong = |why: String| CliError::File { path: path.to_owned(), why };
        let file: Self = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        if file.schema != SCHEMA {
            return Err(wrong(format!("schema {} is not known; {SCHEMA} is", file.schema)));
        }
        // They are printed.
        let ids = file.cases.iter().map(|c| &c.id).chain(file.heads.iter().map(|h| &h.id));
        if let Some(id) = ids.into_iter().find(|id| id.chars().any(char::is_control)) {
            return Err(wrong(format!("id {id:?} has control characters")));
        }
        for c in &file.cases {
            c.check().map_err(|why| wrong(format!("case {}: {why}", c.id)))?;
        }
        let bad = file
            .heads
            .iter()
            .find(|h| h.num_kv_heads == 0 || h.head_size == 0 || !h.num_heads.is_multiple_of(h.num_kv_heads));
        match bad {
            Some(h) => Err(wrong(format!("heads {}: query heads must be a multiple of KV heads", h.id))),
            None => match file.heads.iter().find(|h| h.latent.is_some_and(|l| !h.holds(&l))) {
                Some(h) => Err(wrong(format!(
                    "heads {}: one KV head of rank + rope elements is what latent attention has",
                    h.id
                ))),
                None => Ok(file),
            },
        }
    }
}

impl Heads {
    fn holds(&self, l: &Latent) -> bool {
        self.num_kv_heads == 1 && self.head_size == l.rank + l.rope
    }

    /// A layer with these heads, as selection would be asked for it.
    pub fn layer(&self, platform: &'static str, dtype: DType) -> Layer {
        let latent: Option<LatentDims> = self.latent.map(Into::into);
        let spec = AttentionSpec::new(1, self.num_kv_heads, self.head_size, dtype);
        Layer {
            name: self.id.clone(),
            need: LayerNeed {
                kind: if latent.is_some() { KindTag::Mla } else { KindTag::Standard },
                platform: platform.into(),
                head_size: self.head_size,
                head_size_v: self.head_size,
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                latent,
                dtype,
                kv_cache_dtype: Some(KvCacheDType(dtype.name().into())),
                ..LayerNeed::default()
            },
            cache: match latent {
                Some(_) => KvCacheSpec::Mla(AttentionSpec { head_size_v: 0, ..spec }),
                None => KvCacheSpec::Full(spec),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::measure::Kind, *};

    #[test]
    fn the_embedded_file_is_whole() -> Result<(), CliError> {
        let file = CaseFile::read(None, "cpu")?;
        assert_eq!((file.cases.len(), file.heads.len()), (21, 3));
        let named = |id: &str| file.cases.iter().find(|c| c.id == id).unwrap();
        assert_eq!(named("chunk_512_over_4096").visible_pairs(None), 512 * 4096 + 512 * 513 / 2);
        assert_eq!(named("mixed_2p512_16d1024").new_tokens(), 2 * 512 + 16);
        assert_eq!(named("write_2048").kv_tokens(None), 2048);
        Ok(())
    }

    #[test]
    fn cuda_has_its_own_cases_and_the_cpus() -> Result<(), CliError> {
        let (cpu, cuda) = (CaseFile::read(None, "cpu")?, CaseFile::read(None, "cuda")?);
        let own = CaseFile::parse("cases-cuda.json".as_ref(), EMBEDDED_CUDA)?;
        assert_eq!((own.cases.len(), own.heads.len(), own.dtypes.as_slice()), (61, 4, &["bf16".into()][..]));
        let mut ids: Vec<_> = cuda.cases.iter().map(|c| c.id.as_str()).collect();
        assert!(cpu.cases.iter().chain(&own.cases).all(|c| ids.contains(&c.id.as_str())));
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), cuda.cases.len());
        // A name means one batch in both files.
        for case in &own.cases {
            let same = cpu.cases.iter().find(|c| c.id == case.id);
            assert!(same.is_none_or(|c| c.seqs == case.seqs && c.tokens == case.tokens), "{}", case.id);
        }
        let named = |id: &str| cuda.cases.iter().find(|c| c.id == id).unwrap();
        assert_eq!(named("decode_b256_c32768").kv_tokens(None), 256 * 32768);
        assert_eq!(named("prefill_8x32768").visible_pairs(None), 8 * 32768 * 32769 / 2);
        assert_eq!(named("chunk_512_over_32256").kv_tokens(None), 32768);
        assert_eq!(named("mixed_4p2048_64d4096").new_tokens(), 4 * 2048 + 64);
        assert_eq!(named("write_262144").tokens, 262_144);
        assert!(named("mla_decode_b128_c4096").latent && !named("decode_b128_c8192").latent);
        let latent = own.heads.iter().find(|h| h.id == "mla/128").unwrap().layer("cuda", DType::BF16);
        assert_eq!([latent.q_head(), latent.out_head(), latent.token_bytes()], [192, 128, 576 * 2]);
        assert_eq!([latent.widths(Kind::Decode), latent.widths(Kind::Prefill)], [1088, 320]);
        // The largest case fits into the pool at 32/8/128.
        assert!(named("decode_b256_c32768").kv_tokens(None) * 8 * 128 * 4 <= own.semantics.pool_bytes);
        Ok(())
    }

    #[test]
    fn files_that_say_something_else() {
        let cases = |c: &str| {
            format!(
                r#"{{"schema": "{SCHEMA}", "semantics": {{"pool_bytes": 1}}, "dtypes": [], "threads": [], "heads": [], "cases": [{c}]}}"#
            )
        };
        let error = |text: &str| CaseFile::parse("f.json".as_ref(), text).unwrap_err().to_string();
        assert!(error("{").starts_with("f.json: EOF"));
        assert!(error(&cases("").replace("/1", "/9")).contains("is not known"));
        let more = cases(r#"{"id": "x", "kind": "decode", "cache": "hot", "seqs": [[2, 1]]}"#);
        assert!(error(&more).contains("case x: a request needs"));
        assert!(error(&cases(r#"{"id": "x", "kind": "write", "cache": "hot"}"#)).contains("tokens must be"));
    }
}
