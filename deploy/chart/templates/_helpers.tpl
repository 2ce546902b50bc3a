{{/* Names, labels, images, and what every pod and container has. */}}

{{- define "kinroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kinroute.selector" -}}
app.kubernetes.io/name: kinroute
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kinroute.labels" -}}
{{ include "kinroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of pods: nothing that changes with each release, which would start every worker anew. */}}
{{- define "kinroute.podLabels" -}}
{{ include "kinroute.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kinroute.edgeSelector" -}}
{{ include "kinroute.selector" . }}
app.kubernetes.io/component: edge
{{- end -}}

{{- define "kinroute.workerSelector" -}}
{{ include "kinroute.selector" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{/* Of one pool: dict "root" $ "name" NAME */}}
{{- define "kinroute.poolSelector" -}}
{{ include "kinroute.workerSelector" .root }}
kinroute/pool: {{ .name }}
{{- end -}}

{{/* dict "root" $ "image" IMAGE "suffix" SUFFIX */}}
{{- define "kinroute.image" -}}
{{- $tag := default (printf "%s%s" .root.Chart.AppVersion .suffix) .image.tag -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* The pools that there are, as JSON: what each says over poolDefaults. A pool that is null is none. */}}
{{- define "kinroute.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.pools -}}
{{- if kindIs "map" $pool -}}
{{- $merged := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy $pool) -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,15}[a-z0-9])?$" $name) -}}
{{- fail (printf "pools.%s: a pool's name has 1 to 17 of a-z, 0-9 and -, and begins with a letter" $name) -}}
{{- end -}}
{{- if ne (mod (int $merged.tensorParallelSize) (int $merged.hosts)) 0 -}}
{{- fail (printf "pools.%s.hosts is %d: it must divide tensorParallelSize, %d" $name (int $merged.hosts) (int $merged.tensorParallelSize)) -}}
{{- end -}}
{{- if and $merged.diskTier.cacheSize (not $merged.diskTier.volumeSize) -}}
{{- fail (printf "pools.%s.diskTier.volumeSize is missing: cacheSize is %s" $name $merged.diskTier.cacheSize) -}}
{{- end -}}
{{- $_ := set $pools $name $merged -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Whether a pool has workers on several hosts: "true" or nothing. */}}
{{- define "kinroute.hasGroups" -}}
{{- range $name, $pool := include "kinroute.pools" . | fromJson -}}
{{- if gt (int $pool.hosts) 1 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kinroute.podSecurity" -}}
automountServiceAccountToken: false
# Else the names of Services would be read as settings: KINROUTE_EDGE_PORT and the like.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "kinroute.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Placing pods, of an edge or a pool: dict "of" VALUES "selector" LABELS */}}
{{- define "kinroute.placing" -}}
{{- if .of.topologySpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- .selector | nindent 8 }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- .selector | nindent 8 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Names of Secrets. */}}
{{- define "kinroute.keysSecret" -}}
{{- if .Values.keys.create -}}{{ include "kinroute.fullname" . }}-keys
{{- else -}}{{ required "keys.existingSecret is missing: with keys.create: false, it holds keys.json" .Values.keys.existingSecret }}
{{- end -}}
{{- end -}}
{{- define "kinroute.workerKeysSecret" -}}
{{- if .Values.keys.create -}}{{ include "kinroute.fullname" . }}-worker-keys
{{- else -}}{{ required "keys.existingWorkerSecret is missing: with keys.create: false, it holds worker-keys.json" .Values.keys.existingWorkerSecret }}
{{- end -}}
{{- end -}}
{{- define "kinroute.groupTokenSecret" -}}
{{- if .Values.keys.create -}}{{ include "kinroute.fullname" . }}-group-token
{{- else -}}{{ required "keys.existingGroupTokenSecret is missing: with keys.create: false, it holds token, for workers on several hosts" .Values.keys.existingGroupTokenSecret }}
{{- end -}}
{{- end -}}
{{- define "kinroute.clientsTlsSecret" -}}
{{- if .Values.tls.clients.secretName -}}{{ .Values.tls.clients.secretName }}
{{- else if .Values.tls.clients.issuerRef.name -}}{{ include "kinroute.fullname" . }}-clients-tls
{{- else -}}{{ fail "tls.clients.enabled is true: set tls.clients.secretName, or tls.clients.issuerRef.name to have cert-manager make it" }}
{{- end -}}
{{- end -}}
{{- define "kinroute.edgeTlsSecret" -}}
{{- if .Values.tls.internal.edgeSecretName -}}{{ .Values.tls.internal.edgeSecretName }}
{{- else if .Values.tls.internal.issuerRef.name -}}{{ include "kinroute.fullname" . }}-edge-tls
{{- else -}}{{ fail "tls.internal.enabled is true: set tls.internal.edgeSecretName, or tls.internal.issuerRef.name to have cert-manager make it" }}
{{- end -}}
{{- end -}}
{{- define "kinroute.workerTlsSecret" -}}
{{- if .Values.tls.internal.workerSecretName -}}{{ .Values.tls.internal.workerSecretName }}
{{- else if .Values.tls.internal.issuerRef.name -}}{{ include "kinroute.fullname" . }}-worker-tls
{{- else -}}{{ fail "tls.internal.enabled is true: set tls.internal.workerSecretName, or tls.internal.issuerRef.name to have cert-manager make it" }}
{{- end -}}
{{- end -}}

{{/* The name in the certificates of all workers: they are dialled by addresses that no certificate can name. */}}
{{- define "kinroute.workerTlsName" -}}
{{ include "kinroute.fullname" . }}-worker
{{- end -}}

{{/* Volumes of Secrets that settings name: dict "files" SECRET_FILES */}}
{{- define "kinroute.secretVolumes" -}}
{{- range $name, $file := .files }}
- name: secret-{{ $name }}
  secret:
    secretName: {{ $file.secretName }}
    defaultMode: 0440
{{- end }}
{{- end -}}
{{- define "kinroute.secretMounts" -}}
{{- range $name, $file := .files }}
- name: secret-{{ $name }}
  mountPath: /etc/kinroute/secrets/{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}
