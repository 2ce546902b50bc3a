{{/* Where the model comes from, and where it is in a container. */}}

{{/* The folder of the model, on edges and workers alike. */}}
{{- define "kinroute.modelPath" -}}
/model{{ with .Values.model.subPath }}/{{ . }}{{ end }}
{{- end -}}

{{- define "kinroute.modelVolume" -}}
- name: model
{{- if eq .Values.model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName is missing: model.source is pvc" .Values.model.pvc.claimName }}
    readOnly: true
{{- else if eq .Values.model.source "image" }}
  image:
    reference: {{ required "model.image.reference is missing: model.source is image" .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.hub.sizeLimit }}
{{- end }}
{{- end -}}

{{- define "kinroute.modelMount" -}}
- name: model
  mountPath: /model
  readOnly: true
{{- end -}}

{{/* Fills the folder, where no volume brings it: dict "root" $ "part" "edge" or "worker" "image" IMAGE "pullPolicy" POLICY "resources" RESOURCES.
     An edge reads what text needs, and no weights. */}}
{{- define "kinroute.modelInit" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "embedded" }}
- name: model
  image: {{ include "kinroute.image" (dict "root" .root "image" .root.Values.worker.image "suffix" "-cpu") }}
  imagePullPolicy: {{ .root.Values.worker.image.pullPolicy }}
  command: [sh, -c]
  args:
    - cp /opt/kinroute/models/embedded/{{ if eq .part "edge" }}*.json /opt/kinroute/models/embedded/*.jinja{{ else }}*{{ end }} /model/
{{- else if eq $model.source "hub" }}
- name: model
  image: {{ .image }}
  imagePullPolicy: {{ .pullPolicy }}
  command: [hf]
  args:
    - download
    - {{ required "model.hub.repository is missing: model.source is hub" $model.hub.repository }}
    - --revision
    - {{ $model.hub.revision | quote }}
    - --local-dir
    - {{ include "kinroute.modelPath" .root }}
    {{- if eq .part "edge" }}
    - --include
    - "*.json"
    - --include
    - "*.jinja"
    {{- end }}
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    {{- with $model.hub.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .name }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
{{- end }}
{{- if has $model.source (list "embedded" "hub") }}
  {{- include "kinroute.containerSecurity" .root | nindent 2 }}
  resources: {{- toYaml .resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end -}}
